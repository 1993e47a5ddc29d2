"""The gateway's NATS client: publishes tasks and control messages, receives frames and reports (docs/wire.md)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import Header
from nats.js.errors import APIError

from gateway.admission.load_table import ModelLoadTable
from gateway.streaming.control import ControlOutbox
from gateway.streaming.registry import Registry
from sluice.errors import (
    MessageTooLarge,
    Overloaded,
    SluiceError,
    TransportUnavailable,
)
from sluice.internal.v1.control_pb2 import BatcherReport, HeldTokensRequest
from sluice.internal.v1.frame_pb2 import FrameBundle
from sluice.internal.v1.task_pb2 import Task
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, OversizedMessage, header_bytes, pack, unpack
from sluice.wire.connection import disconnect, settle

M = TypeVar("M", bound=Message)

_log = logging.getLogger(__name__)

PUBLISH_S: Final = 5.0
"""Longest wait for JetStream to store a task, seconds."""
RETRY_AFTER_S: Final = 1.0
_SETTLE_S: Final = 2.0

# Frames of thousands of rows may wait while the loop is busy; what is dropped here must be requested again.
_PENDING_MESSAGES: Final = 1 << 20
_PENDING_BYTES: Final = 256 * 1024 * 1024
# JetStream's error codes for "no room": maximum messages, maximum bytes, insufficient resources, storage.
_FULL: Final = frozenset({10023, 10028, 10047, 10077})


class NatsTransport:
    """Sends for the registry and passes it what arrives. The one user of the NATS connection."""

    def __init__(
        self, gateway_id: str, registry: Registry, outbox: ControlOutbox, loads: ModelLoadTable
    ) -> None:
        self.gateway_id = gateway_id
        self._registry = registry
        self._outbox = outbox
        self._loads = loads
        self._client: Client | None = None
        self._publishing: set[asyncio.Task[None]] = set()
        self._flushing: set[asyncio.Task[None]] = set()
        outbox.on_first = self._schedule_flush

    @property
    def connected(self) -> bool:
        """Whether NATS can be reached now."""
        return self._client is not None and self._client.is_connected

    async def start(self, client: Client) -> None:
        """Subscribes. Frames can arrive as soon as this returns; core NATS drops messages without a subscription."""
        self._client = client
        await self._subscribe(
            client, subjects.frames(self.gateway_id), FrameBundle, self._on_frames
        )
        await self._subscribe(
            client, subjects.held(self.gateway_id), HeldTokensRequest, self._on_held
        )
        await self._subscribe(client, subjects.REPORTS, BatcherReport, self._on_report)
        await settle(client, _SETTLE_S)

    async def close(self) -> None:
        """Sends what is left to send, then closes the connection."""
        if self._client is None:
            return
        if self._publishing:
            await asyncio.wait(self._publishing, timeout=PUBLISH_S)
        await self._flush()
        await disconnect(self._client)

    def submit(self, publishing: Coroutine[Any, Any, None]) -> None:
        """Runs ``publishing`` as a task: it outlives a call that leaves, because another call may have taken over."""
        task = asyncio.ensure_future(publishing)
        self._publishing.add(task)
        task.add_done_callback(self._done)

    async def publish(self, task: Task, headers: Mapping[str, str], deadline: float) -> None:
        """Returns when JetStream has stored ``task``; waits until ``deadline`` (monotonic) and `PUBLISH_S` at most.

        Raises:
            TransportUnavailable: NATS does not answer, or no stream stores tasks.
            Overloaded: there is no room for the task.
            MessageTooLarge: the task is larger than a NATS message may be.
        """
        client = self._client
        if client is None or not client.is_connected:
            raise TransportUnavailable("NATS is not connected", retry_after_s=RETRY_AFTER_S)
        marked = {**headers, Header.MSG_ID: task.request_id}
        try:
            await client.jetstream().publish(
                subjects.tasks(task.model, task.priority_class),
                pack(task, client.max_payload - header_bytes(marked)),
                timeout=min(PUBLISH_S, max(deadline - time.monotonic(), 0.0)),
                headers=marked,
            )
        except (OversizedMessage, TimeoutError, NatsError) as error:
            raise _public_error(error) from error

    def on_reconnect(self) -> None:
        """Messages to this gateway may have been lost: requests the next frames."""
        self._registry.request_missing(time.monotonic())

    def _done(self, publishing: asyncio.Task[None]) -> None:
        self._publishing.discard(publishing)
        if not publishing.cancelled():
            publishing.exception()  # the registry knows it

    def _schedule_flush(self) -> None:
        flushing = asyncio.ensure_future(self._flush())
        self._flushing.add(flushing)
        flushing.add_done_callback(self._flushing.discard)

    async def _flush(self) -> None:
        for message in self._outbox.drain():
            await self._send(subjects.CONTROL, message)

    async def _send(self, subject: str, message: Message) -> None:
        assert self._client is not None, "nothing is sent before start"
        try:
            await self._client.publish(subject, pack(message))
        except NatsError as error:
            # Resends are repeated, and frames of unknown requests are answered with another cancel or confirm.
            _log.warning("NATS: %s not sent: %s", type(message).__name__, error)

    async def _subscribe(
        self,
        client: Client,
        subject: str,
        kind: type[M],
        handle: Callable[[M, str], Awaitable[None]],
    ) -> None:
        """Passes the messages of ``subject`` to ``handle``, each with its reply subject."""

        async def on_message(msg: Msg) -> None:
            try:
                message = unpack(kind, msg.data)
            except MalformedMessage as error:
                _log.error("NATS: %s dropped: %s", kind.__name__, error)
                return
            await handle(message, msg.reply)

        await client.subscribe(
            subject,
            cb=on_message,
            pending_msgs_limit=_PENDING_MESSAGES,
            pending_bytes_limit=_PENDING_BYTES,
        )

    async def _on_frames(self, bundle: FrameBundle, _: str) -> None:
        now = time.monotonic()
        for frame in bundle.frames:
            self._registry.accept(frame, now)

    async def _on_held(self, request: HeldTokensRequest, reply: str) -> None:
        await self._send(reply, self._registry.held(request.request_id))

    async def _on_report(self, report: BatcherReport, _: str) -> None:
        self._loads.update(report, time.monotonic())


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
        message = "NATS did not store the task in time"
    else:
        message = f"NATS did not take the task ({type(error).__name__})"
    return TransportUnavailable(message, retry_after_s=RETRY_AFTER_S)
