"""Messages over core NATS between batchers and gateways: frames, control messages, reports, `Held` queries.

A batcher reports every second, more often while tasks wait, and at once when readiness changes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from batcher.core.frames import bundles
from sluice.internal.v1 import control_pb2, frame_pb2
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, OversizedMessage, pack, unpack
from sluice.wire.connection import settle

log = logging.getLogger(__name__)

SETTLE_S: Final = 10.0
"""The server has this long to take our subscription, seconds."""
ANSWER_S: Final = 2.0
"""Time limit of a gateway's answer about a request, seconds."""
INTERVAL_S: Final = 1.0
BUSY_INTERVAL_S: Final = 0.25
"""While tasks wait, because the expected wait changes quickly."""


class Gateways:
    """Publishes frames under this batcher's id."""

    def __init__(self, nats_client: Client, batcher: str) -> None:
        self._nats = nats_client
        self._batcher = batcher
        self._dropped = 0

    async def send(self, frames: Iterable[tuple[str, frame_pb2.Frame]]) -> None:
        """Sends frames, each to its gateway. Frames that NATS refuses are dropped: gateways request them again."""
        by_gateway: dict[str, list[frame_pb2.Frame]] = {}
        for gateway, frame in frames:
            by_gateway.setdefault(gateway, []).append(frame)
        for gateway, members in by_gateway.items():
            for bundle in bundles(self._batcher, members):
                await self._publish(subjects.frames(gateway), bundle)

    async def listen(
        self,
        on_control: Callable[[control_pb2.ControlMessage], None],
        on_report: Callable[[control_pb2.BatcherReport], None],
    ) -> None:
        """Takes messages until the connection closes; this batcher's own reports come too."""

        async def control(message: Msg) -> None:
            try:
                on_control(unpack(control_pb2.ControlMessage, message.data))
            except MalformedMessage as error:
                log.warning("%s: %s", subjects.CONTROL, error)

        async def report(message: Msg) -> None:
            try:
                on_report(unpack(control_pb2.BatcherReport, message.data))
            except MalformedMessage as error:
                log.warning("%s: %s", subjects.REPORTS, error)

        await self._nats.subscribe(subjects.CONTROL, cb=control)
        await self._nats.subscribe(subjects.REPORTS, cb=report)
        # A Cancel that a gateway sends right after the start must be received.
        await settle(self._nats, SETTLE_S)

    async def _publish(self, subject: str, bundle: frame_pb2.FrameBundle) -> None:
        try:
            await self._nats.publish(subject, pack(bundle))
        except (nats.errors.Error, OversizedMessage) as error:
            if not self._dropped:
                log.warning("frames for %s are dropped: %s", subject, error)
            self._dropped += len(bundle.frames)
        else:
            if self._dropped:
                log.warning("%d frames were dropped", self._dropped)
            self._dropped = 0


class Reporter:
    """Publishes `BatcherReport`.

    Args:
        models: the state of every model now.
    """

    def __init__(
        self,
        nats_client: Client,
        batcher: str,
        models: Callable[[], Sequence[control_pb2.ModelReport]],
    ) -> None:
        self._nats = nats_client
        self._batcher = batcher
        self._models = models
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Readiness has changed: reports at once."""
        self._changed.set()

    async def run(self) -> None:
        """Reports until it is cancelled."""
        while True:
            self._changed.clear()
            report = self._report(leaving=False)
            await self._send(report)
            busy = any(model.queued for model in report.models)
            try:
                async with asyncio.timeout(BUSY_INTERVAL_S if busy else INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def leave(self) -> None:
        """Sends the last report."""
        await self._send(self._report(leaving=True))

    def _report(self, *, leaving: bool) -> control_pb2.BatcherReport:
        return control_pb2.BatcherReport(
            batcher=self._batcher, models=self._models(), leaving=leaving
        )

    async def _send(self, report: control_pb2.BatcherReport) -> None:
        try:
            await self._nats.publish(subjects.REPORTS, pack(report))
        except nats.errors.Error as error:
            log.warning("report: %s", error)


async def ask_held(
    nats_client: Client, gateway: str, request_id: str
) -> control_pb2.HeldTokensResponse | None:
    """The gateway's answer; "does not wait" when it is gone; None when there was none in time."""
    question = pack(control_pb2.HeldTokensRequest(request_id=request_id))
    try:
        reply = await nats_client.request(subjects.held(gateway), question, timeout=ANSWER_S)
        return unpack(control_pb2.HeldTokensResponse, reply.data)
    except nats.errors.NoRespondersError:
        return control_pb2.HeldTokensResponse(waiting=False)
    except (nats.errors.Error, MalformedMessage):
        return None
