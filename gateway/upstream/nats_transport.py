"""The gateway's NATS client: sends tasks and control messages, receives frames and reports (docs/internals/wire.md)."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NotFoundError
from opentelemetry.trace import Tracer

from gateway.admission.load_table import ModelLoadTable
from gateway.streaming.dispatch import SentRow
from gateway.streaming.registry import Registry
from sluice.background import BackgroundTasks
from sluice.errors import (
    RETRY_AFTER_S,
    MessageTooLarge,
    Overloaded,
    SluiceError,
    TransportUnavailable,
)
from sluice.internal.v1.control_pb2 import Announce, ControlMessage
from sluice.settings import NatsSettings
from sluice.telemetry.lost_spans import RecentRows
from sluice.wire import jetstream, subjects
from sluice.wire.codec import (
    MalformedMessage,
    OversizedMessage,
    header_bytes,
    pack,
    read_bundle,
    read_report,
)
from sluice.wire.connection import disconnect, settle
from sluice.wire.dead_letters import store_dead_letter

_log = logging.getLogger(__name__)

STORE_S: Final = 1.5
"""Longest wait for JetStream to store a task, or to say what became of it, seconds."""
PONG_S: Final = 0.5
"""NATS answers a ping in this time, or this gateway is cut off, seconds."""
UNSTORED_S: Final = 5.0
"""Tasks of class bulk are refused for this long after JetStream took one not, seconds: callers need not wait again."""
TELL_S: Final = 10.0
"""How often batchers hear of the same model and tenant, seconds; they listen for longer."""
CLOSE_S: Final = 2.0
_SETTLE_S: Final = 2.0
_TOLD_MAX: Final = 4096
CONSUMER_S: Final = 30.0
"""JetStream keeps a consumer that nobody pulls from for longer, seconds (`jetstream.tasks_consumer`)."""

# Frames of thousands of rows may wait while the loop is busy; what is dropped here must be requested again.
_PENDING_MESSAGES: Final = 1 << 20
_PENDING_BYTES: Final = 256 * 1024 * 1024
# JetStream's error codes for "no room": maximum messages, maximum bytes, insufficient resources, storage.
_FULL: Final = frozenset({10023, 10028, 10047, 10077})


class NatsTransport:
    """Sends for the registry and passes it what arrives. The one user of the NATS connection."""

    def __init__(
        self,
        gateway_id: str,
        registry: Registry,
        loads: ModelLoadTable,
        tracer: Tracer,
        settings: NatsSettings,
    ) -> None:
        """``tracer``: of this process."""
        self._settings = settings
        self.gateway_id = gateway_id
        self._recent = RecentRows(tracer, "batcher")
        self._registry = registry
        self._loads = loads
        self._client: Client | None = None
        self._working = BackgroundTasks()
        self._unstored_at: float | None = None
        self._told: dict[tuple[str, str], float] = {}
        """When batchers were told of the tasks of a model and tenant."""
        self._pulled: dict[tuple[str, str], float] = {}
        """When it was made sure that batchers have something to pull those from."""
        self._taking = False
        registry.dispatch.on_first = lambda: self._working.spawn(self._flush())

    @property
    def connected(self) -> bool:
        """Whether NATS can be reached now."""
        return self._client is not None and self._client.is_connected

    def stores(self, now: float) -> bool:
        """Whether JetStream takes tasks, as far as is known."""
        return self._unstored_at is None or now - self._unstored_at > UNSTORED_S

    async def start(self, client: Client) -> None:
        """Subscribes, and asks batchers for their reports.

        Frames can arrive as soon as this returns; core NATS drops messages without a subscription.
        """
        self._client = client
        await client.subscribe(
            subjects.frames(self.gateway_id),
            cb=self._on_frames,
            pending_msgs_limit=_PENDING_MESSAGES,
            pending_bytes_limit=_PENDING_BYTES,
        )
        await client.subscribe(subjects.ALL_REPORTS, cb=self._on_report)
        await client.subscribe(subjects.absent(self.gateway_id, subjects.ANY), cb=self._on_absent)
        announce = ControlMessage(gateway=self.gateway_id, announce=Announce())
        await client.publish(subjects.CONTROL, pack(announce))
        await settle(client, _SETTLE_S)

    async def close(self) -> None:
        """Sends what is left to send, then closes the connection."""
        if self._client is None:
            return
        await self._flush()
        leaving = ControlMessage(gateway=self.gateway_id, announce=Announce(leaving=True))
        await self._send_control("", leaving)
        await self._working.settle(CLOSE_S)
        await disconnect(self._client)

    def problem(self, row: SentRow, now: float) -> SluiceError | None:
        """Why the row's task cannot be sent now."""
        if not self.connected:
            return TransportUnavailable("NATS is not connected", retry_after_s=RETRY_AFTER_S)
        if row.is_queued and not self.stores(now):
            message = "JetStream does not store tasks now; other classes do not need it"
            return TransportUnavailable(message, retry_after_s=UNSTORED_S)
        return None

    def on_reconnect(self) -> None:
        """Messages to this gateway may have been lost."""
        self._registry.dispatch.restart(time.monotonic())

    # What goes out.

    async def _flush(self) -> None:
        outgoing = self._registry.dispatch.drain()
        for batcher, row in outgoing.tasks:
            await self._send_task(batcher, row)
        for batcher, message in outgoing.control:
            await self._send_control(batcher, message)
        for row in outgoing.stored:
            self._working.spawn(self._store(row))
        for queue in outgoing.lookups:
            self._working.spawn(self._look_up(queue))
        for row, reason in outgoing.dead:
            self._working.spawn(self._bury(row, reason))
        if outgoing.questions:
            await self._prove_link()

    async def _send_task(self, batcher: str, row: SentRow) -> None:
        reply = subjects.absent(self.gateway_id, batcher)
        try:
            payload = self._packed(row)
            await self._nats.publish(subjects.task_to(batcher), payload, reply, dict(row.headers))
        except (OversizedMessage, NatsError) as error:
            self._failed(row, error)

    async def _send_control(self, batcher: str, message: ControlMessage) -> None:
        subject = subjects.control_to(batcher) if batcher else subjects.CONTROL
        reply = subjects.absent(self.gateway_id, batcher) if batcher else ""
        try:
            await self._nats.publish(subject, pack(message), reply)
        except NatsError as error:
            # Questions are repeated, and frames of unknown requests are answered with another cancel.
            _log.warning("NATS: a control message is not sent: %s", error)

    async def _store(self, row: SentRow) -> None:
        subject = subjects.queued_tasks(*row.queue)
        try:
            await self._make_consumer(row.queue)
            stored = await self._nats.jetstream().publish(
                subject, self._packed(row), timeout=STORE_S, headers=dict(row.headers)
            )
        except (OversizedMessage, TimeoutError, NatsError) as error:
            self._failed(row, error)
        else:
            self._unstored_at = None
            self._registry.stored(row.row_id, stored.seq, time.monotonic())
            await self._tell(row.queue)

    async def _make_consumer(self, queue: tuple[str, str], *, known: bool = True) -> None:
        """Batchers may not create what they pull the tasks of a model and tenant from.

        ``known``: whether one that was there a moment ago is there still.
        """
        now = time.monotonic()
        if known and now - self._pulled.get(queue, -CONSUMER_S) < CONSUMER_S:
            return
        config = jetstream.tasks_consumer(*queue, self._settings)
        await self._nats.jetstream(timeout=STORE_S).add_consumer(subjects.TASKS_STREAM, config)
        if len(self._pulled) >= _TOLD_MAX:
            self._pulled.clear()
        self._pulled[queue] = now

    async def _tell(self, queue: tuple[str, str]) -> None:
        """Batchers hear of a model and tenant that has tasks; they look for themselves too, now and then."""
        now = time.monotonic()
        if now - self._told.get(queue, -TELL_S) < TELL_S:
            return
        if len(self._told) >= _TOLD_MAX:
            self._told.clear()
        self._told[queue] = now
        with suppress(NatsError):
            await self._nats.publish(subjects.waiting(*queue))

    async def _look_up(self, queue: tuple[str, str]) -> None:
        """How far batchers have taken the tasks of a model and tenant; without an answer nothing is lost."""
        consumer = subjects.tasks_consumer(*queue)
        try:
            async with asyncio.timeout(STORE_S):
                info = await self._nats.jetstream().consumer_info(subjects.TASKS_STREAM, consumer)
        except NotFoundError:
            await self._make_consumer_again(queue)
            return
        except (TimeoutError, NatsError) as error:
            _log.warning("JetStream does not say what became of tasks of %s: %s", queue, error)
            return
        taken = 0 if info.delivered is None else info.delivered.stream_seq
        self._registry.dispatch.taken_up_to(queue, taken, time.monotonic())

    async def _make_consumer_again(self, queue: tuple[str, str]) -> None:
        try:
            await self._make_consumer(queue, known=False)
        except (TimeoutError, NatsError) as error:
            _log.warning("batchers cannot pull the tasks of %s: %s", queue, error)

    async def _bury(self, row: SentRow, reason: str) -> None:
        task, payload = row.task, row.task.SerializeToString()
        await store_dead_letter(
            self._nats, task.model, task.priority_class, payload, row.headers, reason
        )

    async def _prove_link(self) -> None:
        """Batchers are not to blame for silence while NATS itself does not answer."""
        try:
            async with asyncio.timeout(PONG_S):
                await self._nats.flush()
        except (TimeoutError, NatsError):
            self._registry.dispatch.restart(time.monotonic())

    def _packed(self, row: SentRow) -> bytes:
        return pack(row.task, self._nats.max_payload - header_bytes(row.headers))

    def _failed(self, row: SentRow, error: Exception) -> None:
        public = _public_error(error)
        if row.is_queued and isinstance(public, TransportUnavailable):
            self._unstored_at = time.monotonic()
        self._registry.publish_failed(row.row_id, public)

    @property
    def _nats(self) -> Client:
        assert self._client is not None, "nothing is sent before start"
        return self._client

    # What comes in.

    async def _on_frames(self, message: Msg) -> None:
        try:
            bundle = read_bundle(message.data)
        except MalformedMessage as error:
            _log.error("NATS: frames are dropped: %s", error)
            return
        now = time.monotonic()
        for frame in bundle.frames:
            if frame.HasField("final"):
                self._recent.ended(
                    bundle.batcher, self._registry.dispatch.headers(frame.request_id), now
                )
        if self._registry.take(bundle, now) and not self._taking:
            self._taking = True
            self._working.spawn(self._take_more())

    async def _take_more(self) -> None:
        """Other work of the loop comes between the pieces."""
        try:
            while self._registry.take_more(time.monotonic()):  # noqa: ASYNC110
                await asyncio.sleep(0)
        finally:
            self._taking = False

    async def _on_report(self, message: Msg) -> None:
        try:
            report = read_report(message.subject, message.data)
        except MalformedMessage as error:
            _log.error("NATS: a report is dropped: %s", error)
            return
        now = time.monotonic()
        self._loads.update(report, now)
        self._registry.dispatch.heard(report.batcher, now)

    async def _on_absent(self, message: Msg) -> None:
        """Nobody has subscribed for a batcher."""
        batcher, now = message.subject.rpartition(".")[2], time.monotonic()
        self._recent.lost(batcher, now)
        self._registry.dispatch.gone(batcher, now)


def _public_error(error: Exception) -> SluiceError:
    """The public error for a publish that failed."""
    if isinstance(error, OversizedMessage):
        return MessageTooLarge(
            f"the task has {error.size} bytes, NATS takes {error.limit}",
            metadata={"bytes": str(error.size), "limit_bytes": str(error.limit)},
        )
    if isinstance(error, APIError) and error.err_code in _FULL:
        return Overloaded("the queue of tasks is full", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, TimeoutError):
        message = "JetStream did not store the task in time"
    else:
        message = f"NATS did not take the task ({type(error).__name__})"
    return TransportUnavailable(message, retry_after_s=RETRY_AFTER_S)
