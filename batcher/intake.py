"""Tasks from JetStream to the ledger of one model: pulled by class as far as there is room, and checked.

What was pulled is ordered here, so a class takes no more than it has room for, but enough that its urgent tasks, other
tenants and like lengths are seen.

A task that was delivered before, or waited long, is asked about first: its gateway may hold tokens of it, or have gone.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from batcher.backlog import Backlog
from batcher.door import task_of
from batcher.held import ask_held
from batcher.pulls import Puller
from batcher.settlement import HeldMessages
from sluice.internal.v1 import task_pb2
from sluice.wire import clock, jetstream, subjects
from sluice.wire.codec import MalformedMessage

SETTLE_S: Final = 3.0
FRESH_MS: Final = 5000
"""A task that waited longer in JetStream is asked about: its caller may have gone before any batcher held it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A task at the door, with what is known of its answer."""

    task: task_pb2.Task
    headers: Mapping[str, str]
    deliveries: int
    produced: tuple[int, ...]


class Sink(Protocol):
    """Who takes tasks."""

    def room(self, priority_class: str) -> int:
        """How many more tasks of a class may come."""

    def room_bytes(self) -> int:
        """How many more bytes of tasks may come."""

    def on_arrival(self, arrival: Arrival) -> None:
        """A task to be answered."""

    def on_exhausted(self, arrival: Arrival) -> None:
        """A task that was delivered too often."""

    def on_unwanted(self, request_id: str) -> None:
        """A task nobody waits for."""


class Intake:
    """The pulls of one model; ``pending_max`` is what all batchers may hold of a class together.

    Attributes:
        backlog: by class, tasks that no batcher has taken, as far as known.
    """

    def __init__(
        self,
        nats_client: Client,
        model: str,
        pending_max: int,
        messages: HeldMessages,
        sink: Sink,
    ) -> None:
        self._nats = nats_client
        self._js: JetStreamContext = nats_client.jetstream()
        self._model = model
        self._pending_max = pending_max
        self._messages = messages
        self._sink = sink
        self._asking: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pullers = [self._puller(name) for name in subjects.CLASSES]
        self.backlog = Backlog(self._js, model, lambda name: self._room(name) <= 0)

    def nudge(self) -> None:
        """There may be more room than before."""
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
        """Pulls until it is cancelled; tasks that were on their way are taken before it returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.backlog.run())
            for puller in self._pullers:
                group.create_task(puller.run())

    async def settle(self) -> None:
        """Waits, but not for ever, for what is still being asked or buried."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SETTLE_S)

    def _puller(self, priority_class: str) -> Puller:
        return Puller(
            self._nats,
            subjects.tasks_consumer(self._model, priority_class),
            self.prepare,
            lambda: self._room(priority_class),
            self._sink.room_bytes,
            lambda message: self._take(priority_class, message),
        )

    def _room(self, priority_class: str) -> int:
        return self._sink.room(priority_class) - self._asking[priority_class]

    def _take(self, priority_class: str, message: Msg) -> None:
        try:
            task = task_of(message.data, self._model, priority_class)
        except MalformedMessage as error:
            self._spawn(self._messages.bury_message(message, str(error)))
            return
        if not self._messages.keep(task.request_id, message):
            return  # Delivered again while it is being worked on: only the message is new.
        metadata = message.metadata
        self.backlog.seen(priority_class, metadata.num_pending)
        deliveries = metadata.num_delivered
        age_ms = clock.unix_ms() - task.published_unix_ms
        headers = message.headers or {}
        if deliveries == 1 and age_ms < FRESH_MS:
            produced = tuple(task.produced_token_ids)
            self._sink.on_arrival(Arrival(task, headers, deliveries, produced))
        else:
            self._spawn(self._ask(task, headers, deliveries))

    async def _ask(self, task: task_pb2.Task, headers: Mapping[str, str], deliveries: int) -> None:
        self._asking[task.priority_class] += 1
        try:
            answer = await ask_held(self._nats, task.gateway, task.request_id)
        finally:
            self._asking[task.priority_class] -= 1
        if answer is not None and not answer.waiting:
            self._sink.on_unwanted(task.request_id)
            return
        # Without an answer the task starts where it was published: the gateway drops what it has.
        held = task.produced_token_ids if answer is None else answer.token_ids
        arrival = Arrival(task, headers, deliveries, tuple(held))
        exhausted = deliveries > jetstream.MAX_DELIVER
        (self._sink.on_exhausted if exhausted else self._sink.on_arrival)(arrival)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
