"""The bulk tasks of one model: pulls them from JetStream as far as there is room, and validates them.

Pulled tasks are ordered by this batcher, so it takes no more than it has room for, but enough to find urgent tasks,
other tenants and similar lengths among them. A task is acknowledged when it is taken: from then on its gateway looks
after it, as after any other.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from batcher.core.requests import Requests
from batcher.core.row import checked_task
from batcher.jetstream.consumer import Backlog, Puller
from sluice.internal.v1 import task_pb2
from sluice.settings import BatcherSettings, NatsSettings
from sluice.wire import jetstream, subjects
from sluice.wire.codec import MalformedMessage
from sluice.wire.dead_letters import store_dead_letter

SETTLE_S: Final = 3.0
CLASS: Final = subjects.QUEUED_CLASS
GIVEN_UP: Final = f"{jetstream.MAX_DELIVER} batchers ended while they took it"


class Inbox:
    """The pull of one model.

    Args:
        take: called with each task, the headers and the size of its message, and why it must not be computed, if so.

    Attributes:
        settings: the active limits.
        backlog: tasks that no batcher has taken, as far as known.
    """

    def __init__(
        self,
        nats_client: Client,
        model: str,
        nats_settings: NatsSettings,
        settings: BatcherSettings,
        requests: Requests,
        take: Callable[[task_pb2.Task, Mapping[str, str], int, str], None],
    ) -> None:
        self.settings = settings
        self._nats = nats_client
        self._model = model
        self._nats_settings = nats_settings
        self._requests = requests
        self._take = take
        self._burying: set[asyncio.Task[None]] = set()
        consumer = subjects.tasks_consumer(model, CLASS)
        self._puller = Puller(
            nats_client, consumer, self._prepare, self._room, self._room_bytes, self._on_message
        )
        js = nats_client.jetstream()
        self.backlog = Backlog(js, model, lambda: self._room() <= 0)

    def nudge(self) -> None:
        """Call when there may be more room."""
        self._puller.nudge()

    def restart(self) -> None:
        """NATS was reconnected: the open pull is gone."""
        self._puller.restart()

    async def run(self) -> None:
        """Pulls until it is cancelled; tasks in flight are taken before it returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.backlog.run())
            group.create_task(self._puller.run())

    async def settle(self) -> None:
        """Waits a bounded time for dead letters."""
        if self._burying:
            await asyncio.wait(self._burying, timeout=SETTLE_S)

    async def _prepare(self) -> None:
        """Makes sure that streams and consumer exist."""
        js = self._nats.jetstream()
        await jetstream.ensure_streams(js, self._nats_settings, owner=False)
        config = jetstream.tasks_consumer(self._model, self._nats_settings)
        await js.add_consumer(subjects.TASKS_STREAM, config)

    def _room(self) -> int:
        """How many more tasks may come."""
        if not self._requests.active_workers() or self._room_bytes() <= 0:
            return 0
        return self.settings.prefetch_rows - self._requests.queue.waiting(CLASS)

    def _room_bytes(self) -> int:
        """How many more bytes of tasks may come."""
        return self.settings.prefetch_bytes - self._requests.size

    async def _on_message(self, message: Msg) -> None:
        self.backlog.seen(message.metadata.num_pending)
        try:
            task = checked_task(message.data)
            if (task.model, task.priority_class) != (self._model, CLASS):
                raise MalformedMessage("model, priority_class: are not those of the subject")
        except MalformedMessage as error:
            self._spawn(self._bury(message, str(error)))
            return
        given_up = message.metadata.num_delivered > jetstream.MAX_DELIVER
        await self._ack(message)
        self._take(task, message.headers or {}, len(message.data), GIVEN_UP if given_up else "")

    async def _ack(self, message: Msg) -> None:
        try:
            await message.ack()
        except nats.errors.Error:
            return  # It is delivered again, and its gateway does not wait for the second row.

    async def _bury(self, message: Msg, reason: str) -> None:
        payload, headers = message.data, message.headers
        await store_dead_letter(self._nats, self._model, CLASS, payload, headers, reason)
        await self._ack(message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._burying.add(task)
        task.add_done_callback(self._burying.discard)
