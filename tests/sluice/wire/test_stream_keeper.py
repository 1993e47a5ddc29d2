"""Streams that NATS has lost: made again, or a reason while they cannot be, and few lines in the log."""

import asyncio
import logging
from pathlib import Path

import pytest
from google.protobuf.wrappers_pb2 import StringValue
from nats.js.errors import ServiceUnavailableError

from sluice.settings import NatsSettings
from sluice.wire.bucket import Bucket
from sluice.wire.connection import connect, disconnect
from sluice.wire.jetstream import SECRETS, explained
from sluice.wire.permissions import JOBS
from sluice.wire.stream_keeper import REPEAT_S, StreamKeeper
from tests.support.nats import running_nats

BOUND_S = 60.0


async def test_keeper_makes_streams_again_that_a_server_lost(tmp_path: Path) -> None:
    bucket, connected = Bucket(SECRETS), asyncio.Event()
    restored = asyncio.Event()

    async def restore() -> None:
        await bucket.restore()
        restored.set()

    keeper = StreamKeeper(restore)

    def on_loss() -> None:
        connected.set()
        keeper.check_soon()

    async with running_nats(tmp_path) as url:
        client = await connect(NatsSettings(url=url), JOBS, "jobs", on_loss)
        await bucket.start(client)
        await bucket.write("key", StringValue(value="before"))
        running = asyncio.create_task(keeper.run())
    (tmp_path / "store").rename(tmp_path / "lost")
    async with running_nats(tmp_path, int(url.rsplit(":", 1)[1])), asyncio.timeout(BOUND_S):
        await connected.wait()
        await restored.wait()
        assert await bucket.read("key", StringValue) is None
        assert await bucket.write("key", StringValue(value="after"), last=0)
        assert not keeper.problem
        running.cancel()
        await disconnect(client)


async def test_keeper_logs_a_lasting_problem_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now, fails = 0.0, True

    async def restore() -> None:
        if fails:
            raise ServiceUnavailableError

    keeper = StreamKeeper(restore, clock=lambda: now)
    for now in range(int(REPEAT_S) + 1):  # noqa: B007  read by the clock
        await keeper.check()
    assert len(caplog.records) == 2
    assert "runs without JetStream: start it with -js" in keeper.problem
    fails = False
    await keeper.check()
    await keeper.check()
    assert keeper.problem == ""
    assert len(caplog.records) == 3


def test_explained_says_how_to_turn_jetstream_on() -> None:
    assert "start it with -js" in explained(ServiceUnavailableError())
    other = ServiceUnavailableError(code=503, err_code=10023, description="no resources")
    assert "no resources" in explained(other)
    assert explained(TimeoutError()) == "TimeoutError"
