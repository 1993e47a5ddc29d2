"""The gateway's NATS client: sends tasks and control messages, receives frames and reports (docs/internals/wire.md).

Messages to batchers leave at the end of a turn of the event loop, or a moment later to share their cost: `Coalescer`
says when. The latency budget (docs/internals/wire.md, Latency budget) lists every delay of the mesh; its constants are
the gateway's.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from gateway.streaming.dispatch import Dispatch
from gateway.streaming.idempotency import ReplayCache
from gateway.streaming.load_table import ModelLoadTable
from gateway.streaming.model_run import ModelRun
from gateway.streaming.registry import Registry
from sluice.background import BackgroundTasks
from sluice.errors import MessageTooLarge, TransportUnavailable
from sluice.internal.v1.control_pb2 import Announce, BatcherReport, ControlMessage
from sluice.wire import codec, subjects
from sluice.wire.connection import MeshClient, disconnect, settle
from sluice.wire.dead_letters import store_dead_letter
from sluice.wire.permissions import BATCHER, may_send_as

logger = logging.getLogger(__name__)

PONG_S: Final = 0.5
"""How long NATS may take to answer a ping before this gateway counts as cut off, in seconds."""
CLOSE_S: Final = 2.0
"""How long `NatsTransport.close` waits for its background tasks, such as storing dead letters, in seconds."""
SETTLE_S: Final = 2.0
"""How long NATS may take to confirm the subscriptions, in seconds."""

UNREAD_S: Final = 0.025
"""Maximum delay of a bulk task whose answer nobody reads in parts, in seconds. Items of jobs then leave together, which
costs NATS and the batcher less, and such an answer takes seconds."""
UNREAD_MS: Final = 1000
"""Nobody reads parts of an answer whose tokens are coalesced for longer than this, in milliseconds."""
INTERACTIVE_S: Final = 0.01
"""Maximum delay of an interactive task in a busy gateway, in seconds. Tasks that leave together share a batch and a
step of the engine, which costs all processes less."""
FREQUENT: Final = 9
"""Interactive tasks within `FREQUENT_S` from which on they wait for each other; a slower stream gains nothing."""
FREQUENT_S: Final = 4 * INTERACTIVE_S
LAG_S: Final = 0.001
"""Delay of the event loop from which on the gateway is busy, in seconds: others compute on its cores too."""
BUSY_S: Final = 1.0
"""How long a gateway counts as busy after such a delay, in seconds."""


class Coalescer:
    """Signals to the one task that sends messages when they are due."""

    def __init__(self) -> None:
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_at = inf
        """When the timer is due: a timer of uvloop that is due at once does not say it."""
        self._busy_until = -inf
        self._recent = deque([-inf], FREQUENT)
        """When the last interactive tasks came while the gateway was busy."""
        self._leave_at = -inf
        """When the last interactive tasks left, or leave."""

    def note_lag(self, lag_s: float) -> None:
        """Note how much later than it should the event loop came."""
        if lag_s > LAG_S:
            self._busy_until = time.monotonic() + BUSY_S

    def notify(self, run: ModelRun | None = None) -> None:
        """Signal that there is a message: the task of `run`, which may be delayed; None: one that is due now."""
        delay_s, now = 0.0, time.monotonic()
        if run is not None and run.is_urgent:
            if now < self._busy_until:
                self._recent.append(now)
            if now - self._recent[0] < FREQUENT_S:
                if now >= self._leave_at:
                    self._leave_at = max(self._leave_at + INTERACTIVE_S, now)
                delay_s = self._leave_at - now
        elif run is not None and run.is_bulk and run.task.coalesce_ms > UNREAD_MS:
            delay_s = UNREAD_S
        if delay_s <= 0:
            self._is_due.set()
        if self._is_due.is_set():
            return
        loop = asyncio.get_running_loop()
        due_at = loop.time() + delay_s
        if self._timer is None or due_at < self._timer_due_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(due_at, self._is_due.set)
            self._timer_due_at = due_at

    async def wait(self) -> None:
        """Return when messages are due."""
        await self._is_due.wait()
        self._is_due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class NatsTransport:
    """Sends what `Dispatch` has to send, and passes what arrives to the registry.

    Attributes:
        gateway_id: of this gateway.
        loads: takes reports of batchers.
        coalescer: says when messages are due.
        registry: takes frames.
    """

    def __init__(self, gateway_id: str, stall_s: float, replays: ReplayCache) -> None:
        """Start without a connection.

        Args:
            gateway_id: of this gateway.
            stall_s: longest silence of a run, in seconds.
            replays: keeps complete answers.
        """
        self.gateway_id = gateway_id
        self.loads = ModelLoadTable()
        self.coalescer = Coalescer()
        self._dispatch = Dispatch(gateway_id, self.loads, stall_s, self.coalescer.notify)
        self.registry = Registry(self._dispatch, replays)
        self._on_reports: Callable[[BatcherReport], Awaitable[None]] | None = None
        self._client: MeshClient | None = None
        self._background = BackgroundTasks()
        self._flushing: asyncio.Task[None] | None = None
        self._is_taking = False

    @property
    def is_connected(self) -> bool:
        """Whether NATS can be reached now."""
        return self._client is not None and self._client.is_connected

    async def start(
        self,
        client: MeshClient,
        on_report: Callable[[BatcherReport], Awaitable[None]] | None = None,
    ) -> None:
        """Subscribe, and ask batchers for their reports, which `on_report` takes too.

        Frames can arrive as soon as this returns; core NATS drops messages without a subscription.

        Raises:
            NatsUnreachable: NATS does not confirm the subscriptions in time.
        """
        self._client, self._on_reports = client, on_report
        own = subjects.frames(self.gateway_id)
        for subject in (own, f"{own}.*"):
            await client.subscribe(subject, cb=self._on_frames)
        await client.subscribe(subjects.ALL_REPORTS, cb=self._on_report)
        await client.subscribe(subjects.absent(self.gateway_id, subjects.ANY), cb=self._on_absent)
        announce = ControlMessage(gateway=self.gateway_id, announce=Announce())
        await client.publish(subjects.CONTROL, codec.pack(announce))
        await settle(client, SETTLE_S)
        self._flushing = asyncio.create_task(self._flush_when_due(client))

    async def close(self) -> None:
        """Send what is left to send, then close the connection, which others share."""
        if self._client is None:
            return
        if self._flushing is not None:
            self._flushing.cancel()
        await self._flush(self._client)
        await self._background.settle(CLOSE_S)
        await disconnect(self._client)

    def tick(self, now: float) -> None:
        """End what is past its deadline, query silent runs, and forget silent batchers and old replays."""
        self.registry.tick(now, is_connected=self.is_connected)
        self.loads.expire(now)

    def on_reconnect(self) -> None:
        """Give batchers their time anew: messages to this gateway may have been lost."""
        self._dispatch.restart(time.monotonic())

    # What goes out.

    async def _flush_when_due(self, client: MeshClient) -> None:
        while True:
            await self.coalescer.wait()
            try:
                await self._flush(client)
            except Exception:  # without this loop nothing would be sent any more
                logger.exception("sending to batchers failed")

    async def _flush(self, client: MeshClient) -> None:
        """Send everything that `Dispatch` has to send."""
        outgoing = self._dispatch.drain(time.monotonic())
        for batcher, run in outgoing.tasks:
            if run.batcher == batcher:  # else it ended, or moved on, while others were sent
                await self._send_task(client, batcher, run)
        for batcher, message in outgoing.control:
            subject = subjects.control_to(batcher) if batcher else subjects.CONTROL
            reply = subjects.absent(self.gateway_id, batcher) if batcher else ""
            try:
                await client.publish(subject, codec.pack(message), reply)
            except NatsError as error:
                # Queries are repeated, and frames of unknown runs are answered with another cancel.
                logger.warning("dropped a control message to batchers: NATS: %s", error)
        for letter in outgoing.dead:
            self._background.spawn(store_dead_letter(client, *letter))
        if outgoing.has_queries:
            self._background.spawn(self._prove_link(client))

    async def _send_task(self, client: MeshClient, batcher: str, run: ModelRun) -> None:
        headers = dict(run.headers)
        try:
            payload = codec.pack(run.task, client.max_payload - codec.header_bytes(headers))
            await client.publish(
                subjects.task_to(batcher),
                payload,
                subjects.absent(self.gateway_id, batcher),
                headers,
            )
        except codec.OversizedMessage as error:
            self.registry.fail_send(
                run.run_id,
                MessageTooLarge(
                    f"the task has {error.size} bytes, NATS takes {error.limit}",
                    metadata={"bytes": str(error.size), "limit_bytes": str(error.limit)},
                ),
            )
        except NatsError as error:
            text = f"NATS did not take the task ({type(error).__name__})"
            self.registry.fail_send(run.run_id, TransportUnavailable(text))

    async def _prove_link(self, client: MeshClient) -> None:
        """Forgive batchers their silence if NATS itself does not answer."""
        try:
            async with asyncio.timeout(PONG_S):
                await client.flush()
        except (TimeoutError, NatsError):
            self.on_reconnect()

    # What comes in.

    async def _on_frames(self, message: Msg) -> None:
        try:
            bundle = codec.read_bundle(message.data)
            account = message.subject.removeprefix(subjects.frames(self.gateway_id))[1:]
            if not may_send_as(account, BATCHER, bundle.batcher):
                raise codec.MalformedMessage(
                    f"the account {account} speaks as batcher {bundle.batcher}"
                )
        except codec.MalformedMessage as error:
            logger.error("dropped malformed frames on %s: %s", message.subject, error)
            return
        if self.registry.take(bundle, time.monotonic()) and not self._is_taking:
            self._is_taking = True
            self._background.spawn(self._take_deferred())

    async def _take_deferred(self) -> None:
        """Take deferred frames, with other work of the event loop between the pieces."""
        try:
            while self.registry.take_deferred(time.monotonic()):  # noqa: ASYNC110
                await asyncio.sleep(0)
        finally:
            self._is_taking = False

    async def _on_report(self, message: Msg) -> None:
        try:
            report = codec.read_report(message.subject, message.data)
        except codec.MalformedMessage as error:
            logger.error("dropped a malformed report on %s: %s", message.subject, error)
            return
        now = time.monotonic()
        self.loads.update(report, now)
        self._dispatch.note_message(report.batcher, now)
        if self._on_reports is not None:
            await self._on_reports(report)

    async def _on_absent(self, message: Msg) -> None:
        """Recover the runs of a batcher that nobody has subscribed for."""
        batcher = message.subject.rpartition(".")[2]
        self.registry.lose_batcher(batcher, time.monotonic())
