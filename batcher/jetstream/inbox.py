"""The bulk tasks of one model: pulls them from JetStream as far as there is room, and validates them.

Pulled tasks are ordered by this batcher, so it takes no more than it has room for, but enough to find urgent tasks and
similar lengths among them. Each tenant has a subject, a consumer and a pull of its own, and a share of the room:
however many tasks of one wait, those of another come. A batcher hears from gateways which tenants have tasks, and asks
JetStream once a second.

A task is acknowledged when it is taken: from then on its gateway looks after it, as after any other.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from batcher.core.requests import Requests
from batcher.core.row import checked_task
from batcher.jetstream.consumer import Puller
from sluice.background import BackgroundTasks
from sluice.internal.v1 import task_pb2
from sluice.settings import BatcherSettings
from sluice.wire import jetstream, subjects
from sluice.wire.codec import MalformedMessage
from sluice.wire.dead_letters import store_dead_letter

log = logging.getLogger(__name__)

SETTLE_S: Final = 3.0
LOOK_S: Final = 1.0
"""How often JetStream is asked which tenants have tasks, seconds."""
ANSWER_S: Final = 2.0
IDLE_S: Final = 60.0
"""A tenant without tasks is pulled for this long, seconds; gateways tell of it again sooner."""
CLASS: Final = subjects.QUEUED_CLASS
GIVEN_UP: Final = f"{jetstream.MAX_DELIVER} batchers ended while they took it"


class TenantPull:
    """The pull of one tenant.

    Attributes:
        backlog: its tasks that no batcher has taken, as far as known.
        used_at: when it had tasks last.
    """

    def __init__(self, puller: Puller, running: asyncio.Task[None]) -> None:
        self.puller = puller
        self.running = running
        self.backlog = 0
        self.used_at = time.monotonic()

    def seen(self, backlog: int) -> None:
        """There are, or were just now, tasks of it."""
        self.backlog, self.used_at = backlog, time.monotonic()


class Inbox:
    """The pulls of one model.

    Args:
        take: called with each task, the headers and the size of its message, and why it must not be computed, if so.

    Attributes:
        settings: the active limits.
    """

    def __init__(
        self,
        nats_client: Client,
        model: str,
        settings: BatcherSettings,
        requests: Requests,
        take: Callable[[task_pb2.Task, Mapping[str, str], int, str], None],
    ) -> None:
        self.settings = settings
        self._nats = nats_client
        self._model = model
        self._requests = requests
        self._take = take
        self._burying = BackgroundTasks()
        self._tenants: dict[str, TenantPull] = {}
        self._look_now = asyncio.Event()
        self._answered = True

    @property
    def backlog(self) -> int:
        """Tasks that no batcher has taken, as far as known."""
        return sum(pull.backlog for pull in self._tenants.values())

    def nudge(self) -> None:
        """Call when there may be more room."""
        for pull in self._tenants.values():
            pull.puller.nudge()

    def restart(self) -> None:
        """NATS was reconnected: open pulls are gone."""
        self._look_now.set()
        for pull in self._tenants.values():
            pull.puller.restart()

    async def run(self) -> None:
        """Pulls until it is cancelled; tasks in flight are taken before it returns."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._pull_all(group)
        finally:
            self._tenants.clear()

    async def _pull_all(self, group: asyncio.TaskGroup) -> None:
        async def told(message: Msg) -> None:
            self._open(group, message.subject.rpartition(".")[2])

        listening = await self._nats.subscribe(subjects.waiting(self._model, subjects.ANY), cb=told)
        try:
            while True:
                self._look_now.clear()
                await self._look(group)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._look_now.wait()
        finally:
            with suppress(nats.errors.Error):
                await listening.unsubscribe()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """Pulls of every tenant that has tasks, and of none that has had none for a while."""
        counts = await self._counts()
        if counts is None:
            return
        for tenant in counts.keys() - self._tenants.keys():
            self._open(group, tenant)
        idle_since = time.monotonic() - IDLE_S
        for tenant, pull in list(self._tenants.items()):
            if count := counts.get(tenant, 0):
                pull.seen(count)
            elif pull.used_at < idle_since:
                pull.running.cancel()
                del self._tenants[tenant]
            else:
                pull.backlog = 0

    async def _counts(self) -> dict[str, int] | None:
        """By tenant, tasks in JetStream; None: it does not answer."""
        wanted = subjects.queued_tasks(self._model, subjects.ANY)
        try:
            async with asyncio.timeout(ANSWER_S):
                info = await self._nats.jetstream().stream_info(subjects.TASKS_STREAM, wanted)
        except NotFoundError:
            return {}  # a gateway makes it
        except (TimeoutError, nats.errors.Error) as error:
            if self._answered:  # one line, however long it lasts
                log.warning("JetStream does not say which tasks of %s wait: %s", self._model, error)
            self._answered = False
            return None
        self._answered = True
        counts = info.state.subjects or {}
        return {subject.rpartition(".")[2]: count for subject, count in counts.items()}

    def _open(self, group: asyncio.TaskGroup, tenant: str) -> None:
        if tenant in self._tenants:
            self._tenants[tenant].used_at = time.monotonic()
            return
        puller = Puller(
            self._nats,
            subjects.tasks_consumer(self._model, tenant),
            partial(self._room, tenant),
            self._room_bytes,
            partial(self._on_message, tenant),
        )
        self._tenants[tenant] = TenantPull(puller, group.create_task(puller.run()))

    async def settle(self) -> None:
        """Waits a bounded time for dead letters."""
        await self._burying.settle(SETTLE_S)

    def _room(self, tenant: str) -> int:
        """How many more tasks of a tenant may come."""
        if not self._requests.active_workers() or self._room_bytes() <= 0:
            return 0
        limit = self.settings.prefetch_rows
        return self._requests.queue.prefetch_room(CLASS, tenant, limit)

    def _room_bytes(self) -> int:
        """How many more bytes of tasks may come."""
        return self.settings.prefetch_bytes - self._requests.size

    async def _on_message(self, tenant: str, message: Msg) -> None:
        if tenant in self._tenants:
            self._tenants[tenant].seen(message.metadata.num_pending)
        try:
            task = checked_task(message.data)
            said = task.model, task.priority_class, task.tenant or "default"
            if said != (self._model, CLASS, tenant):
                raise MalformedMessage("model, class and tenant are not those of the subject")
        except MalformedMessage as error:
            self._burying.spawn(self._bury(message, str(error)))
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
