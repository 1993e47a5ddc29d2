"""What a gateway takes from NATS."""

import asyncio

import pytest

from sluice.internal.v1.frame_pb2 import FrameBundle
from sluice.internal.v1.task_pb2 import Task
from sluice.wire import subjects
from sluice.wire.codec import pack
from tests.gateway.kit.batcher import BOUND_S, last
from tests.gateway.kit.wire import Wire, events_of, prompt


async def say(wire: Wire, task: Task, account: str) -> None:
    """The last frame of ``task``, as it comes from ``account``."""
    frame = last(0, wire.tokens("hello"))
    frame.request_id, frame.attempt = task.request_id, task.attempt
    bundle = FrameBundle(batcher=wire.batcher.name, frames=[frame])
    await wire.batcher.client.publish(f"{subjects.frames(task.gateway)}.{account}", pack(bundle))
    await wire.batcher.client.flush()


async def test_frames_of_another_account_are_dropped(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    call = asyncio.ensure_future(events_of(wire.stub.Generate(prompt())))
    task = await wire.batcher.task()
    await say(wire, task, "batcher-another")
    await wire.until(lambda: "the account batcher-another speaks as batcher" in caplog.text)
    assert not call.done()
    await say(wire, task, f"batcher-{wire.batcher.name}")
    assert (await asyncio.wait_for(call, BOUND_S))[-1].HasField("finished")
