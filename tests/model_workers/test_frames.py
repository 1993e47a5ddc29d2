from dataclasses import asdict

from google.protobuf.json_format import MessageToDict

from model_workers import frames
from model_workers.engine.protocol import Load, RankLoad
from sluice.internal.v1 import worker_pb2


def test_every_number_of_the_load_is_passed_on() -> None:
    load = Load(*range(1, 11), ranks=(RankLoad(1, 2, 3, 4), RankLoad(5, 6, 7, 8)), places=11)
    message = frames.load(load)
    expected = asdict(load)
    ranks = expected.pop("ranks")
    assert {name: getattr(message, name) for name in expected} == expected
    assert [MessageToDict(rank) for rank in message.ranks] == [
        MessageToDict(worker_pb2.RankLoad(**rank)) for rank in ranks
    ]
