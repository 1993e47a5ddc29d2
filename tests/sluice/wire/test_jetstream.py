"""The streams on a real server: their limits hold by subject, and change without losing a task."""

import nats
import pytest
from nats.js.errors import APIError

from sluice.settings import NatsSettings
from sluice.wire import jetstream, subjects

FULL = 10077


async def test_a_full_class_shuts_out_no_other_one(nats_url: str) -> None:
    async with await nats.connect(nats_url) as client:
        js = client.jetstream()
        await jetstream.ensure_streams(js, NatsSettings(tasks_max_messages=2))
        for _ in range(2):
            await js.publish(subjects.tasks("m", "bulk"), b"task")
        with pytest.raises(APIError) as caught:
            await js.publish(subjects.tasks("m", "bulk"), b"task")
        assert caught.value.err_code == FULL
        await js.publish(subjects.tasks("m", "interactive"), b"task")
        # Another configuration, as a start of a process brings it.
        await jetstream.ensure_streams(js, NatsSettings(tasks_max_messages=3))
        await js.publish(subjects.tasks("m", "bulk"), b"task")
        assert (await js.stream_info(subjects.TASKS_STREAM)).state.messages == 4
