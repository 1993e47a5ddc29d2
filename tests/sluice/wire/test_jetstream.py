"""The streams on a real server: their limits change without losing a message."""

import nats

from sluice.wire import jetstream, subjects


async def test_a_stream_that_exists_gets_the_limits_of_now(nats_url: str) -> None:
    async with await nats.connect(nats_url) as client:
        js = client.jetstream()
        for size in (1 << 20, 1 << 21):
            config = jetstream.DEAD_LETTERS.evolve(max_bytes=size)
            await jetstream.ensure_stream(js, config, 1)
            await js.publish(subjects.dead_letters("m", "bulk"), b"task")
        info = await js.stream_info(subjects.DEAD_LETTERS_STREAM)
        assert (info.state.messages, info.config.max_bytes) == (2, 1 << 21)
