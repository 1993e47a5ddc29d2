"""Messages over core NATS between a batcher and gateways: frames, tasks, control messages, reports.

A batcher reports every second, more often while tasks wait, and at once when readiness changes.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection
from typing import Final, Protocol

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from sluice.internal.v1 import control_pb2, frame_pb2
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, OversizedMessage, pack, read_control
from sluice.wire.connection import MeshClient, settle

log = logging.getLogger(__name__)

SETTLE_S: Final = 10.0
"""The server has this long to take our subscription, seconds."""
INTERVAL_S: Final = 1.0
BUSY_INTERVAL_S: Final = 0.25
CAPACITY_DELAY_S: Final = 0.05
"""Delay of the report that capacity is used up or free again, in seconds: under full load that changes all the time."""
"""While tasks wait, because the expected wait changes quickly."""

ABSENT_S: Final = 30.0
"""Rows of a gateway that was away for this long are dropped, seconds."""
UNHEARD_S: Final = 0.05
"""Rows that wait here for a gateway that is away are dropped: it sends them again when it is back. One that was heard
of so lately is there, and its subscription on the way through a cluster; seconds."""
HEARD_S: Final = 60.0
"""A gateway that was silent for longer has no share of the bytes of the room, seconds; it may still send."""
GATEWAYS_MAX: Final = 1024
"""Gateways of which it is known when they were heard of."""
RECONNECT_S: Final = 1.0
"""After this batcher has lost NATS, gateways may be as late as this to be there again, seconds."""
ABSENT_PAUSE_S: Final = 5.0
"""Two messages that found no gateway and were further apart than this do not prove that it was away in between."""

ABSENT_ANSWER_S: Final = 0.2
"""How long NATS may take to say that nobody takes a message, seconds."""


class GatewayEvents(Protocol):
    """Receives what gateways send."""

    def on_task(self, payload: bytes, headers: dict[str, str] | None) -> None:
        """A task for this batcher."""

    def on_control(self, message: control_pb2.ControlMessage, *, broadcast: bool) -> None:
        """A control message, for this batcher or for all."""

    def on_gateway_gone(self, gateway: str, *, waiting_only: bool = False) -> None:
        """A gateway has been away for `ABSENT_S`; ``waiting_only``: it is away."""


class Gateways:
    """Sends to gateways under this batcher's id, and receives."""

    def __init__(self, nats_client: MeshClient, batcher: str) -> None:
        self._nats = nats_client
        self._batcher = batcher
        self._dropped = 0
        self._absent: dict[str, tuple[float, float]] = {}
        """Gateways that were not there: since when, and when that was seen last."""
        self._heard_at: dict[str, float] = {}
        """By gateway, the one that was silent for longest first."""
        self._back_at = -math.inf
        """When this batcher had NATS again."""

    async def absent(self, gateways: Collection[str]) -> set[str]:
        """Those of ``gateways`` that are not there, as NATS says of a message without content."""
        asked_at = time.monotonic()
        for gateway in gateways:
            await self.send(gateway, frame_pb2.FrameBundle(batcher=self._batcher))
        await asyncio.sleep(ABSENT_ANSWER_S)
        return {one for one in gateways if self._absent.get(one, (0.0, 0.0))[1] >= asked_at}

    async def listen(self, events: GatewayEvents) -> None:
        """Takes messages until the connection closes."""

        def own(message: Msg) -> None:
            if message.subject == own_task:
                events.on_task(message.data, message.headers)
            else:
                _take_control(message, events, broadcast=False)

        async def control(message: Msg) -> None:
            _take_control(message, events, broadcast=True)

        async def absent(message: Msg) -> None:
            gateway = message.subject.rpartition(".")[2]
            away_s = self._away_s(gateway, time.monotonic())
            if away_s is not None:
                events.on_gateway_gone(gateway, waiting_only=away_s < ABSENT_S)

        own_task = subjects.task_to(self._batcher)
        await self._nats.take(subjects.all_to(self._batcher), own)
        await self._nats.subscribe(subjects.CONTROL, cb=control)
        await self._nats.subscribe(subjects.absent(self._batcher, subjects.ANY), cb=absent)
        # The first report brings tasks.
        await settle(self._nats, SETTLE_S)

    def restart(self, now: float) -> None:
        """This batcher was without NATS, and so were gateways, perhaps."""
        self._back_at = now

    def heard(self, gateway: str, now: float) -> None:
        """A message came from a gateway."""
        self._absent.pop(gateway, None)
        self._heard_at.pop(gateway, None)
        self._heard_at[gateway] = now
        if len(self._heard_at) > GATEWAYS_MAX:
            del self._heard_at[next(iter(self._heard_at))]

    def count(self, now: float) -> int:
        """Gateways that were heard of lately."""
        return sum(now - at < HEARD_S for at in self._heard_at.values())

    def _away_s(self, gateway: str, now: float) -> float | None:
        """How long a gateway has been away that a message has not found; None: it is there, or may be."""
        since, last = self._absent.get(gateway, (now, now))
        heard_at = self._heard_at.setdefault(gateway, now)  # its word may be on its way
        if now - self._back_at < RECONNECT_S or now - heard_at < UNHEARD_S:
            self._absent[gateway] = now, now
            return None
        if now - last > ABSENT_PAUSE_S:
            since = now
        self._absent[gateway] = since, now
        if now - since >= ABSENT_S:
            del self._absent[gateway]
            log.info("gateway %s is gone: its rows are dropped", gateway)
        return now - since

    async def send(self, gateway: str, bundle: frame_pb2.FrameBundle) -> None:
        """Tells a gateway something. What NATS refuses is dropped: the gateway asks for it again."""
        reply = subjects.absent(self._batcher, gateway)
        try:
            await self._nats.publish(subjects.frames(gateway), pack(bundle), reply)
        except (nats.errors.Error, OversizedMessage) as error:
            if not self._dropped:
                log.warning("frames for %s are dropped: %s", gateway, error)
            self._dropped += len(bundle.frames)
        else:
            if self._dropped:
                log.warning("%d frames were dropped", self._dropped)
            self._dropped = 0


def _take_control(message: Msg, events: GatewayEvents, *, broadcast: bool) -> None:
    try:
        control = read_control(message.data)
    except MalformedMessage as error:
        log.warning("%s: %s", message.subject, error)
    else:
        events.on_control(control, broadcast=broadcast)


class Reporter:
    """Publishes `BatcherReport`; ``report`` makes one."""

    def __init__(
        self, nats_client: Client, report: Callable[[], control_pb2.BatcherReport]
    ) -> None:
        self._nats = nats_client
        self._report = report
        # Above that of an earlier process with this id, whose reports are known still.
        self._sequence = time.time_ns() // 1_000_000
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """Readiness has changed: reports at once."""
        self._changed.set()

    def capacity_changed(self) -> None:
        """Report within `CAPACITY_DELAY_S`: all granted capacity is used, or not any more."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CAPACITY_DELAY_S, self._changed.set)

    async def run(self) -> None:
        """Reports until it is cancelled."""
        while True:
            self._changed.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            report = await self._send()
            busy = any(
                one.queued or one.expected_wait_ms
                for model in report.models
                for one in model.classes
            )
            try:
                async with asyncio.timeout(BUSY_INTERVAL_S if busy else INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def leave(self) -> None:
        """Sends the last report."""
        await self._send(leaving=True)

    async def _send(self, *, leaving: bool = False) -> control_pb2.BatcherReport:
        report = self._report()
        self._sequence += 1
        report.sequence, report.leaving = self._sequence, leaving
        try:
            await self._nats.publish(subjects.report(report.batcher), pack(report))
        except nats.errors.Error as error:
            log.warning("report: %s", error)
        return report
