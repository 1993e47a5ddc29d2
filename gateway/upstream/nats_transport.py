"""The gateway's NATS client: sends tasks and control messages, receives frames and reports (docs/internals/wire.md)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from opentelemetry.trace import Tracer

from gateway.admission.loads import ModelLoadTable
from gateway.streaming.registry import Registry
from gateway.streaming.room import SentRow
from sluice.background import BackgroundTasks
from sluice.errors import (
    RETRY_AFTER_S,
    MessageTooLarge,
    TransportUnavailable,
)
from sluice.internal.v1.control_pb2 import Announce, BatcherReport, ControlMessage
from sluice.telemetry.lost_spans import RecentRows
from sluice.wire import subjects
from sluice.wire.codec import (
    MalformedMessage,
    OversizedMessage,
    header_bytes,
    pack,
    read_bundle,
    read_report,
)
from sluice.wire.connection import MeshClient, disconnect, settle
from sluice.wire.dead_letters import store_dead_letter
from sluice.wire.permissions import BATCHER, may_speak_as

_log = logging.getLogger(__name__)

PONG_S: Final = 0.5
"""NATS answers a ping in this time, or this gateway is cut off, seconds."""
CLOSE_S: Final = 2.0
_SETTLE_S: Final = 2.0

Publication = tuple[str, bytes, str, dict[str, str] | None]
"""Subject, payload, reply subject, headers."""


class NatsTransport:
    """Sends for the registry and passes it what arrives. The one user of the NATS connection.

    Attributes:
        on_report: takes reports of batchers too.
    """

    def __init__(
        self,
        gateway_id: str,
        registry: Registry,
        loads: ModelLoadTable,
        tracer: Tracer,
    ) -> None:
        """``tracer``: of this process."""
        self.gateway_id = gateway_id
        self._recent = RecentRows(tracer, "batcher")
        self._registry = registry
        self._dispatch = registry.dispatch
        self._loads = loads
        self._client: MeshClient | None = None
        self._working = BackgroundTasks()
        self._taking = False
        self.on_report: Callable[[BatcherReport], Awaitable[None]] | None = None

    @property
    def connected(self) -> bool:
        """Whether NATS can be reached now."""
        return self._client is not None and self._client.is_connected

    async def start(self, client: MeshClient) -> None:
        """Subscribes, and asks batchers for their reports.

        Frames can arrive as soon as this returns; core NATS drops messages without a subscription.
        """
        self._client = client
        own = subjects.frames(self.gateway_id)
        for subject in (own, f"{own}.*"):
            await client.take(subject, self._on_frames)
        await client.subscribe(subjects.ALL_REPORTS, cb=self._on_report)
        await client.subscribe(subjects.absent(self.gateway_id, subjects.ANY), cb=self._on_absent)
        announce = ControlMessage(gateway=self.gateway_id, announce=Announce())
        await client.publish(subjects.CONTROL, pack(announce))
        await settle(client, _SETTLE_S)

    async def close(self) -> None:
        """Sends what is left to send, then closes the connection."""
        if self._client is None:
            return
        self.flush()
        leaving = ControlMessage(gateway=self.gateway_id, announce=Announce(leaving=True))
        self._send_control("", leaving)
        await self._working.settle(CLOSE_S)
        await disconnect(self._client)

    def on_reconnect(self) -> None:
        """Messages to this gateway may have been lost."""
        self._dispatch.restart(time.monotonic())

    # What goes out.

    def flush(self) -> None:
        """Sends what the registry has to send."""
        self._dispatch.fill(time.monotonic())
        outgoing = self._dispatch.drain()
        for batcher, row in outgoing.tasks:
            self._send_task(batcher, row)
        for batcher, message in outgoing.control:
            self._send_control(batcher, message)
        for row, reason in outgoing.dead:
            task, payload = row.task, row.task.SerializeToString()
            about = task.model, task.priority_class, payload, row.headers, reason
            self._working.spawn(store_dead_letter(self._nats, *about))
        if outgoing.questions:
            self._working.spawn(self._prove_link())

    def _send_task(self, batcher: str, row: SentRow) -> None:
        row_id, headers = row.task.request_id, dict(row.headers)
        try:
            payload = pack(row.task, self._nats.max_payload - header_bytes(headers))
        except OversizedMessage as error:
            problem = MessageTooLarge(
                f"the task has {error.size} bytes, NATS takes {error.limit}",
                metadata={"bytes": str(error.size), "limit_bytes": str(error.limit)},
            )
            self._registry.publish_failed(row_id, problem)
        else:
            reply = subjects.absent(self.gateway_id, batcher)
            self._send(row_id, subjects.task_to(batcher), payload, reply, headers)

    def _send_control(self, batcher: str, message: ControlMessage) -> None:
        subject = subjects.control_to(batcher) if batcher else subjects.CONTROL
        reply = subjects.absent(self.gateway_id, batcher) if batcher else ""
        self._send("", subject, pack(message), reply, None)

    def _send(self, row_id: str, *message: *Publication) -> None:
        """At once, or when NATS takes it; ``row_id``: of the task, if it is one."""
        if not self._nats.send(*message):
            self._working.spawn(self._send_late(row_id, *message))

    async def _send_late(self, row_id: str, *message: *Publication) -> None:
        try:
            await self._nats.publish(*message)
        except NatsError as error:
            if not row_id:
                # Questions are repeated, and frames of unknown requests are answered with another cancel.
                _log.warning("NATS: a control message is not sent: %s", error)
                return
            text = f"NATS did not take the task ({type(error).__name__})"
            problem = TransportUnavailable(text, retry_after_s=RETRY_AFTER_S)
            self._registry.publish_failed(row_id, problem)

    async def _prove_link(self) -> None:
        """Batchers are not to blame for silence while NATS itself does not answer."""
        try:
            async with asyncio.timeout(PONG_S):
                await self._nats.flush()
        except (TimeoutError, NatsError):
            self.on_reconnect()

    @property
    def _nats(self) -> MeshClient:
        assert self._client is not None, "nothing is sent before start"
        return self._client

    # What comes in.

    def _on_frames(self, message: Msg) -> None:
        try:
            bundle = read_bundle(message.data)
            account = message.subject.removeprefix(subjects.frames(self.gateway_id))[1:]
            if not may_speak_as(account, BATCHER, bundle.batcher):
                raise MalformedMessage(f"the account {account} speaks as batcher {bundle.batcher}")
        except MalformedMessage as error:
            _log.error("NATS: frames are dropped: %s", error)
            return
        now = time.monotonic()
        for frame in bundle.frames:
            if frame.HasField("final"):
                self._recent.ended(bundle.batcher, self._dispatch.headers(frame.request_id), now)
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
        self._dispatch.heard(report.batcher, now)
        if self.on_report is not None:
            await self.on_report(report)

    async def _on_absent(self, message: Msg) -> None:
        """Nobody has subscribed for a batcher."""
        batcher, now = message.subject.rpartition(".")[2], time.monotonic()
        self._recent.lost(batcher, now)
        self._dispatch.gone(batcher, now)
