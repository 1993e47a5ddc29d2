"""The inbox of one model: pulls tasks from JetStream by class as far as there is room, and validates them.

Pulled tasks are ordered by this batcher, so a class takes no more than it has room for, but enough to find urgent
tasks, other tenants and similar lengths among them.

For a task that was delivered before, or waited long, the gateway is asked first: it may have tokens of it, or be gone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from batcher.core.requests import Requests
from batcher.core.row import Row, checked_task
from batcher.gateways import ask_held
from batcher.jetstream.acks import HeldMessages
from batcher.jetstream.consumer import Backlog, Puller
from sluice.errors import EngineFailed
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.settings import BatcherSettings
from sluice.wire import clock, jetstream, subjects
from sluice.wire.codec import MalformedMessage

SETTLE_S: Final = 3.0
FRESH_MS: Final = 5000
"""For a task that waited longer in JetStream the gateway is asked first: its caller may be gone."""


class Inbox:
    """The pulls of one model.

    Args:
        pending_max: tasks of a class that all batchers may hold together.
        arrived: called with the task and the NATS headers of each that is taken.
        wake: called when the table has changed.

    Attributes:
        settings: the active limits.
        backlog: by class, tasks that no batcher has taken, as far as known.
    """

    def __init__(
        self,
        nats_client: Client,
        model: str,
        pending_max: int,
        settings: BatcherSettings,
        requests: Requests,
        messages: HeldMessages,
        arrived: Callable[[task_pb2.Task, Mapping[str, str]], None],
        wake: Callable[[], None],
    ) -> None:
        self.settings = settings
        self._nats = nats_client
        self._js: JetStreamContext = nats_client.jetstream()
        self._model = model
        self._pending_max = pending_max
        self._requests = requests
        self._messages = messages
        self._arrived = arrived
        self._wake = wake
        self._asking: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pullers = [self._puller(name) for name in subjects.CLASSES]
        self.backlog = Backlog(self._js, model, lambda name: self._room(name) <= 0)

    def nudge(self) -> None:
        """Call when there may be more room."""
        for puller in self._pullers:
            puller.nudge()

    def restart(self) -> None:
        """NATS was reconnected: open pulls are gone."""
        for puller in self._pullers:
            puller.restart()

    async def prepare(self) -> None:
        """Makes sure that the consumers exist."""
        for name in subjects.CLASSES:
            config = jetstream.tasks_consumer(self._model, name, self._pending_max)
            await self._js.add_consumer(subjects.TASKS_STREAM, config)

    async def run(self) -> None:
        """Pulls until it is cancelled; tasks in flight are taken before it returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.backlog.run())
            for puller in self._pullers:
                group.create_task(puller.run())

    async def settle(self) -> None:
        """Waits a bounded time for open questions to gateways and for dead letters."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SETTLE_S)

    def _puller(self, priority_class: str) -> Puller:
        return Puller(
            self._nats,
            subjects.tasks_consumer(self._model, priority_class),
            self.prepare,
            lambda: self._room(priority_class),
            self._room_bytes,
            lambda message: self._take(priority_class, message),
        )

    def _room(self, priority_class: str) -> int:
        """How many more tasks of a class may come."""
        if not self._requests.active_workers() or self._room_bytes() <= 0:
            return 0
        held = self._requests.queue.waiting(priority_class) + self._asking[priority_class]
        return self.settings.prefetch_rows - held

    def _room_bytes(self) -> int:
        """How many more bytes of tasks may come."""
        return self.settings.prefetch_bytes - self._messages.size

    def _take(self, priority_class: str, message: Msg) -> None:
        try:
            task = checked_task(message.data, self._model, priority_class)
        except MalformedMessage as error:
            self._spawn(self._messages.bury_message(message, str(error)))
            return
        if not self._messages.keep(task.request_id, message):
            return  # Redelivered while it is being processed: only the message is new.
        self.backlog.seen(priority_class, message.metadata.num_pending)
        deliveries, headers = message.metadata.num_delivered, message.headers or {}
        if deliveries == 1 and clock.unix_ms() - task.published_unix_ms < FRESH_MS:
            self._add(task, headers, deliveries)
        else:
            self._spawn(self._ask(task, headers, deliveries))

    async def _ask(self, task: task_pb2.Task, headers: Mapping[str, str], deliveries: int) -> None:
        self._asking[task.priority_class] += 1
        try:
            answer = await ask_held(self._nats, task.gateway, task.request_id)
        finally:
            self._asking[task.priority_class] -= 1
        if answer is not None and not answer.waiting:
            self._requests.drop(task.request_id)
            self._wake()
            return
        if (
            answer is not None
        ):  # Else the task starts where it was published: the gateway drops what it has.
            del task.produced_token_ids[:]
            task.produced_token_ids.extend(answer.token_ids)
        self._add(task, headers, deliveries)

    def _add(self, task: task_pb2.Task, headers: Mapping[str, str], deliveries: int) -> None:
        if task.request_id in self._requests:
            return  # Redelivered while it is becoming a dead letter.
        self._arrived(task, headers)
        now, due_ms = time.monotonic(), task.deadline_unix_ms
        # From the wall clock to the monotonic one.
        left_s = (due_ms - clock.unix_ms()) / 1e3 if due_ms else float("inf")
        row = Row(
            task,
            deliveries=deliveries,
            produced=task.produced_token_ids,
            deadline=now + left_s,
            now=now,
        )
        if deliveries > jetstream.MAX_DELIVER:
            message = f"the task was delivered {jetstream.MAX_DELIVER} times without an end"
            error = frame_pb2.RowError(reason=EngineFailed.reason, message=message)
            self._requests.bury(row, error, now)
        else:
            self._requests.add(row, now)
        self._wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
