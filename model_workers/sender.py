"""Sends reports to batchers on their channels, and ends their other requests.

In Triton, sending blocks for a round trip through shared memory. That must not delay the engine, so it has a thread of
its own.

If the engine hangs, its channels are ended and batchers send their tasks elsewhere. The engine may recover and serve
new channels; if it does not, the process ends.
"""

import faulthandler
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Condition
from types import MappingProxyType
from typing import Final

from model_workers.channels import Channel, Channels, DueReport, Posted, ResponseSender
from model_workers.grants import Grant
from model_workers.watchdog import TICK_S, Watchdog
from sluice.internal.v1 import worker_pb2

BACKLOG_FRAMES_MAX: Final = 4096
"""Unsent frames of all channels above which the engine waits before its next step."""
BACKLOG_WAIT_S: Final = 1.0
"""Longest wait of the engine for the sender before it looks for commands again, in seconds."""
IDLE_LOOK_S: Final = 1.0
"""Interval at which an idle engine is looked at, in seconds: it may begin to hang without a notification."""
HANG_S: Final = 10.0
"""Time beyond the watchdog's limit after which the process is given up, in seconds."""

logger = logging.getLogger(__name__)


class Sender:
    """Owns the channels. `run` is its thread; every other method may be called from any thread."""

    def __init__(
        self,
        channels: Channels,
        watchdog: Watchdog,
        clock: Callable[[], float],
        on_lost: Callable[[str, float], None],
        on_hang: Callable[[], None],
        backlog_wait_s: float = BACKLOG_WAIT_S,
    ) -> None:
        """Create a sender.

        - `on_lost`: Called by `run` with a batcher and the time (monotonic seconds) at which its channel was lost.
        - `on_hang`: Called by `run` at each look at an engine that is overdue by more than `HANG_S`.
        - `backlog_wait_s`: See `BACKLOG_WAIT_S`.
        """
        self._backlog_wait_s = backlog_wait_s
        self._channels = channels
        self._watchdog = watchdog
        self._clock = clock
        self._on_lost, self._on_hang = on_lost, on_hang
        self._ends: deque[ResponseSender] = deque()
        self._changed = Condition()
        self._stopping = False

    def open(self, opening: worker_pb2.OpenChannel, responses: ResponseSender) -> None:
        """Open or renew the channel of a batcher; end the request that it replaces, or this one if it is outdated."""
        with self._changed:
            older = self._channels.open(opening, responses, self._clock())
            if older is not None:
                self._ends.append(older)
            self._changed.notify_all()

    def make_ready(self, batcher: str, epoch: int) -> None:
        """Mark a channel as served by the engine; ignored if it was lost or replaced."""
        with self._changed:
            channel = self._channels.get(batcher, epoch)
            if channel is not None:
                # What the channel before was granted is nothing to this one.
                channel.ready, channel.grant = True, Grant()
                channel.load_update_at = -math.inf
                self._changed.notify_all()

    def has_channel(self, batcher: str, epoch: int) -> bool:
        """Return whether this channel is open."""
        with self._changed:
            return self._channels.get(batcher, epoch) is not None

    def end(self, responses: ResponseSender, batch: worker_pb2.Batch | None = None) -> None:
        """End a request that is no channel; its `batch` is expected on the channel.

        The sender's thread ends it, so that the caller does not wait for the round trip.
        """
        with self._changed:
            if batch is not None:
                self._channels.expect(batch.batcher, batch.epoch, self._clock())
            self._ends.append(responses)
            self._changed.notify_all()

    def post(
        self,
        steps: Mapping[str, Sequence[Posted]],
        load: worker_pb2.WorkerLoad,
        admissions: Mapping[str, Sequence[worker_pb2.Admission]] = MappingProxyType({}),
        grants: Mapping[str, Grant] = MappingProxyType({}),
    ) -> None:
        """Add the load after a step or commands, and by batcher the steps, admissions and grants."""
        now = self._clock()
        with self._changed:
            due_at = self._channels.next_due()
            self._channels.set_load(load, now)
            for batcher, admitted in admissions.items():
                self._channels.admit(batcher, admitted, now)
            for batcher, posted in steps.items():
                self._channels.post(batcher, posted, now)
            for batcher, grant in grants.items():
                self._channels.grant(batcher, grant, now)
            # Wake the thread only if it would sleep too long.
            if self._channels.next_due() != due_at:
                self._changed.notify_all()

    def has_capacity(self) -> bool:
        """Wait a bounded time for the backlog to shrink below its limit; return whether it has."""
        with self._changed:
            shrunk = self._changed.wait_for(
                lambda: self._channels.backlog < BACKLOG_FRAMES_MAX, self._backlog_wait_s
            )
            return bool(shrunk)

    def stop(self) -> None:
        """Let `run` send what is due, end all requests and return."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        """Send until `stop`."""
        while True:
            with self._changed:
                if not (self._stopping or self._ends):
                    self._changed.wait(self._seconds_until_due())
                stopping = self._stopping
                ends, self._ends = self._ends, deque()
                reports = self._channels.due(self._clock())
                self._changed.notify_all()
            for responses in ends:
                self._try(responses.close)
            for due in reports:
                self._deliver(due)
            self._check_engine()
            if stopping and not ends and not reports:
                break
        with self._changed:
            channels = self._channels.drain()
        for channel in channels:
            self._try(channel.responses.close)

    def _seconds_until_due(self) -> float:
        """Return the time until the next report is due or the engine is looked at, in seconds."""
        look_s = TICK_S if self._watchdog.works else IDLE_LOOK_S
        due_at = self._channels.next_due()
        return look_s if due_at is None else min(max(0.0, due_at - self._clock()), look_s)

    def _check_engine(self) -> None:
        overdue_s = self._watchdog.overdue_s(self._clock())
        if not overdue_s:
            return
        with self._changed:
            served = self._channels.ready()
        for channel in served:
            logger.error("engine hangs: ending the channel of batcher %s", channel.batcher)
            self._lose(channel)
        if overdue_s > HANG_S:
            logger.error("engine did not recover within %.0f s, giving up; its stack:", HANG_S)
            faulthandler.dump_traceback()
            self._on_hang()

    def _deliver(self, due: DueReport) -> None:
        channel = due.channel
        cancelled = due.is_heartbeat and channel.responses.is_cancelled()
        if cancelled or not self._try(lambda: channel.responses.send(due.report)):
            logger.info(
                "lost the channel of batcher %s: it was cancelled, or a report could not be sent",
                channel.batcher,
            )
            self._lose(channel)

    def _lose(self, channel: Channel) -> None:
        with self._changed:
            lost_at = self._clock()
            was_open = self._channels.drop(channel)
        if was_open:
            self._on_lost(channel.batcher, lost_at)
            self._try(channel.responses.close)

    def _try(self, send: Callable[[], None]) -> bool:
        """Call `send`; log an exception, such as that of a request that is gone, and return False."""
        try:
            send()
        except Exception:
            # The thread must go on for the other channels.
            logger.exception("response to a batcher could not be sent")
            return False
        return True
