"""Messages over core NATS between a batcher and gateways: tasks and control in, frames and reports out.

A batcher reports its load every second, more often while requests wait, and at once when readiness
changes.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from sluice.background import wait_for_event
from sluice.internal.v1 import control_pb2, frame_pb2
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, OversizedMessage, pack, read_control
from sluice.wire.connection import MeshClient, settle

logger = logging.getLogger(__name__)

SETTLE_S: Final = 10.0
"""How long the NATS server may take to accept the subscriptions, in seconds."""
INTERVAL_S: Final = 1.0
"""Interval of reports, in seconds."""
BUSY_INTERVAL_S: Final = 0.25
"""Interval of reports while requests wait, in seconds: the expected wait changes quickly then."""
CAPACITY_DELAY_S: Final = 0.05
"""Delay of the report that capacity is used up or free again, in seconds: under load it changes constantly."""

ABSENT_S: Final = 30.0
"""Absence after which all requests of a gateway are dropped, in seconds."""
GRACE_S: Final = 0.05
"""Grace period before "no responders" counts as absence, in seconds.

In a NATS cluster the subscription of a new gateway can arrive after its first message."""
SILENCE_S: Final = 60.0
"""Silence after which a gateway gets no share of the batcher's bytes, in seconds; it may still send."""
GATEWAYS_MAX: Final = 1024
"""Gateways whose last message is remembered."""
RECONNECT_S: Final = 1.0
"""Time that gateways have to reconnect after this batcher has reconnected to NATS, in seconds."""
ABSENT_PAUSE_S: Final = 5.0
"""Two failed messages further apart than this, in seconds, do not prove absence in between."""

OnTask = Callable[[bytes, dict[str, str] | None], None]
OnControl = Callable[[control_pb2.ControlMessage, bool], None]


class GatewayTransport:
    """Receives messages of gateways and sends to them, under the id of this batcher."""

    def __init__(self, nats_client: MeshClient, batcher: str) -> None:
        self._nats = nats_client
        self._batcher = batcher
        self._dropped = 0
        self._absent: dict[str, tuple[float, float]] = {}
        """Absent gateways: since when, and when that was last observed."""
        self._last_message_at: dict[str, float] = {}
        """Time of the last message by gateway, or of the first failed one to it; longest silent first."""
        self._reconnected_at = -math.inf

    async def listen(
        self,
        on_task: OnTask,
        on_control: OnControl,
        on_absent: Callable[[str, bool], None],
    ) -> None:
        """Subscribe to the messages of gateways; return once the server has the subscriptions.

        Args:
            on_task: gets the payload and headers of a task for this batcher.
            on_control: gets a control message, and whether it is for all batchers.
            on_absent: gets a gateway that did not receive a message, and whether it has been absent
                for `ABSENT_S`, so that it counts as gone.

        Raises:
            NatsUnreachable: the server did not answer within `SETTLE_S`.
        """

        async def on_message(message: Msg) -> None:
            if message.subject == own_task:
                on_task(message.data, message.headers)
                return
            try:
                control = read_control(message.data)
            except MalformedMessage as error:
                subject = message.subject
                logger.warning("ignored malformed control message on %s: %s", subject, error)
            else:
                on_control(control, message.subject == subjects.CONTROL)

        async def on_no_responders(message: Msg) -> None:
            gateway = message.subject.rpartition(".")[2]
            absent_s = self.absence_s(gateway, time.monotonic())
            if absent_s is not None:
                on_absent(gateway, absent_s >= ABSENT_S)

        own_task = subjects.task_to(self._batcher)
        await self._nats.subscribe(subjects.all_to(self._batcher), cb=on_message)
        await self._nats.subscribe(subjects.CONTROL, cb=on_message)
        await self._nats.subscribe(
            subjects.absent(self._batcher, subjects.ANY), cb=on_no_responders
        )
        # The first report attracts tasks, so the server must have the subscriptions before.
        await settle(self._nats, SETTLE_S)

    def on_reconnect(self, now: float) -> None:
        """Note that this batcher was without NATS, and so perhaps were gateways."""
        self._reconnected_at = now

    def on_message(self, gateway: str, now: float) -> None:
        """Note that a gateway sent a message."""
        self._absent.pop(gateway, None)
        self._last_message_at.pop(gateway, None)
        self._last_message_at[gateway] = now
        if len(self._last_message_at) > GATEWAYS_MAX:
            del self._last_message_at[next(iter(self._last_message_at))]

    def count(self, now: float) -> int:
        """Return how many gateways sent a message lately."""
        return sum(now - at < SILENCE_S for at in self._last_message_at.values())

    def absence_s(self, gateway: str, now: float) -> float | None:
        """Record that a gateway did not receive a message; return how long it has been absent, None if it may be there.

        At `ABSENT_S` it counts as gone, and its absence starts anew.
        """
        since, last = self._absent.get(gateway, (now, now))
        # The first message of a gateway may be on its way.
        last_message_at = self._last_message_at.setdefault(gateway, now)
        if now - self._reconnected_at < RECONNECT_S or now - last_message_at < GRACE_S:
            self._absent[gateway] = now, now
            return None
        if now - last > ABSENT_PAUSE_S:
            since = now
        self._absent[gateway] = since, now
        if now - since >= ABSENT_S:
            del self._absent[gateway]
            logger.info("gateway %s is gone, dropping its requests", gateway)
        return now - since

    async def send(self, gateway: str, bundle: frame_pb2.FrameBundle) -> None:
        """Send a bundle. If it is too large or NATS refuses it, it is dropped: the gateway asks for it again."""
        reply = subjects.absent(self._batcher, gateway)
        try:
            await self._nats.publish(subjects.frames(gateway), pack(bundle), reply)
        except (nats.errors.Error, OversizedMessage) as error:
            if not self._dropped:
                logger.warning("dropping frames for gateway %s: %s", gateway, error)
            self._dropped += len(bundle.frames)
        else:
            if self._dropped:
                logger.warning("dropped %d frames", self._dropped)
            self._dropped = 0


class Reporter:
    """Publishes the `BatcherReport` that `report` returns."""

    def __init__(
        self, nats_client: Client, report: Callable[[], control_pb2.BatcherReport]
    ) -> None:
        self._nats = nats_client
        self._report = report
        # Above the numbers of an earlier process with this id, whose reports are still remembered.
        self._sequence = time.time_ns() // 1_000_000
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def on_readiness(self) -> None:
        """Report at once: the readiness of a model has changed."""
        self._changed.set()

    def on_capacity(self) -> None:
        """Report after `CAPACITY_DELAY_S` or with an earlier report: all granted capacity is used, or no longer."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CAPACITY_DELAY_S, self._changed.set)

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self._changed.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            report = await self._send()
            classes = [entry for model in report.models for entry in model.classes]
            is_busy = any(entry.queued or entry.expected_wait_ms for entry in classes)
            await wait_for_event(self._changed, BUSY_INTERVAL_S if is_busy else INTERVAL_S)

    async def leave(self) -> None:
        """Send the last report, which tells gateways that this batcher leaves."""
        await self._send(leaving=True)

    async def _send(self, *, leaving: bool = False) -> control_pb2.BatcherReport:
        report = self._report()
        self._sequence += 1
        report.sequence, report.leaving = self._sequence, leaving
        try:
            await self._nats.publish(subjects.report(report.batcher), pack(report))
        except nats.errors.Error as error:
            logger.warning("publishing the load report failed: %s", error)
        return report
