"""JetStream loses what gateways share: they make their streams again, with the secrets that they use."""

from pathlib import Path

from google.protobuf.wrappers_pb2 import StringValue

from sluice.wire.bucket import Bucket
from sluice.wire.jetstream import SECRETS
from tests.gateway.kit.wire import open_wire
from tests.support.nats import running_nats


async def test_gateway_makes_its_streams_again(tmp_path: Path, model_folder: Path) -> None:
    async with (
        running_nats(tmp_path) as url,  # of others: streams of jobs
        open_wire(url, model_folder, resume_key=None) as wire,
    ):
        js = wire.batcher.jetstream
        names = {info.config.name for info in await js.streams_info()}
        secrets = Bucket(SECRETS)
        secrets.open(wire.batcher.client)
        before = await secrets.read("resume_key", StringValue)
        for name in names:
            await js.delete_stream(name or "")
        for _ in range(2):  # as often as it is looked at
            await wire.gateway.streams.check()
        assert {info.config.name for info in await js.streams_info()} == names
        after = await secrets.read("resume_key", StringValue)
        assert before is not None
        assert after is not None
        assert after[0] == before[0]
