"""Frames to the gateways, and what gateways and batchers say to all batchers."""

import logging
from collections.abc import Iterable
from typing import Final, Protocol

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


class Listener(Protocol):
    """Who is told what gateways want, and what other batchers report."""

    def on_control(self, message: control_pb2.ControlMessage) -> None:
        """A cancel, resend or confirm; requests that are not held are ignored."""

    def on_report(self, report: control_pb2.BatcherReport) -> None:
        """The state of a batcher; our own reports come too."""


class Delivery:
    """Publishes frames under this batcher's id."""

    def __init__(self, nats_client: Client, batcher: str) -> None:
        self._nats = nats_client
        self._batcher = batcher
        self._dropped = 0

    async def send(self, frames: Iterable[tuple[str, frame_pb2.Frame]]) -> None:
        """Sends frames, each to its gateway. What NATS does not take is dropped: gateways ask for what they miss."""
        by_gateway: dict[str, list[frame_pb2.Frame]] = {}
        for gateway, frame in frames:
            by_gateway.setdefault(gateway, []).append(frame)
        for gateway, members in by_gateway.items():
            for bundle in bundles(self._batcher, members):
                await self._publish(subjects.frames(gateway), bundle)

    async def listen(self, listener: Listener) -> None:
        """Takes messages until the connection closes."""

        async def control(message: Msg) -> None:
            try:
                listener.on_control(unpack(control_pb2.ControlMessage, message.data))
            except MalformedMessage as error:
                log.warning("%s: %s", subjects.CONTROL, error)

        async def report(message: Msg) -> None:
            try:
                listener.on_report(unpack(control_pb2.BatcherReport, message.data))
            except MalformedMessage as error:
                log.warning("%s: %s", subjects.REPORTS, error)

        await self._nats.subscribe(subjects.CONTROL, cb=control)
        await self._nats.subscribe(subjects.REPORTS, cb=report)
        # A Cancel that a gateway sends right after our start must find us.
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
