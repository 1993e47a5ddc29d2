"""Items of an input on their way to the gateways."""

from jobs.items import Item
from jobs.sources import WHOLE_S, _block_of, defaults_of, entry_of
from sluice.openai.requests import request_of_plain
from sluice.v1.inference_pb2 import PRIORITY_BULK
from sluice.v1.jobs_pb2 import Job, JobSpec


def test_an_item_is_bulk_and_its_answer_comes_as_a_whole() -> None:
    spec = JobSpec(model="small")
    item = Item("item-1", 1, request_of_plain({"prompt": "hello"}, defaults_of(spec)))
    request = entry_of(Job(id="job", spec=spec), 0, item).request
    assert request.priority == PRIORITY_BULK
    assert request.gather.seconds == WHOLE_S


def test_a_block_ends_by_its_bytes() -> None:
    spec = JobSpec(model="small")
    item = Item("item-1", 1, request_of_plain({"prompt": "x" * 1_000_000}, defaults_of(spec)))
    entries = (entry_of(Job(id="job", spec=spec), place, item) for place in range(12))

    assert [len(_block_of(entries)) for _ in range(4)] == [5, 5, 2, 0]
