"""One consumer's pulls, against a real nats-server."""

import asyncio

import nats
import pytest
from nats.aio.msg import Msg

from batcher.jetstream.consumer import Puller
from sluice.settings import NatsSettings
from sluice.wire import jetstream, subjects

ROOM = 5
MESSAGES = 40 * ROOM
BOUND_S = 60.0


async def test_a_task_comes_again_until_a_batcher_has_it(nats_url: str) -> None:
    """Also when the delivery in which the batcher would have given up was lost."""
    client = await nats.connect(nats_url)
    try:
        js = client.jetstream()
        await js.add_stream(jetstream.tasks_stream(NatsSettings()))
        config = jetstream.tasks_consumer("lost", "t", NatsSettings())
        await js.add_consumer(subjects.TASKS_STREAM, config)
        await js.publish(subjects.queued_tasks("lost", "t"), b"x")
        consumer = subjects.tasks_consumer("lost", "t")
        pull = await js.pull_subscribe_bind(consumer, stream=subjects.TASKS_STREAM)
        for number in range(1, jetstream.MAX_DELIVER + 3):
            (message,) = await pull.fetch(1, timeout=BOUND_S)
            assert message.metadata.num_delivered == number
            await message.nak()
    finally:
        await client.close()


async def test_pulls_that_are_used_up_follow_each_other_without_a_wait(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says "Batch Completed" behind the last message of a pull; that is no failure."""
    client = await nats.connect(nats_url)
    taken, all_taken = list[Msg](), asyncio.Event()

    async def take(message: Msg) -> None:
        taken.append(message)
        if len(taken) == MESSAGES:
            all_taken.set()

    try:
        js = client.jetstream()
        await js.add_stream(jetstream.tasks_stream(NatsSettings()))
        config = jetstream.tasks_consumer("pulled", "t", NatsSettings())
        await js.add_consumer(subjects.TASKS_STREAM, config)
        for _ in range(MESSAGES):
            await js.publish(subjects.queued_tasks("pulled", "t"), b"x")
        consumer = subjects.tasks_consumer("pulled", "t")
        puller = Puller(client, consumer, lambda: ROOM, lambda: 1 << 20, take)
        running = asyncio.create_task(puller.run())
        async with asyncio.timeout(BOUND_S):
            await all_taken.wait()
        running.cancel()
        await asyncio.wait([running])
        assert len(taken) == MESSAGES
        assert "pull on" not in caplog.text
    finally:
        await client.close()
