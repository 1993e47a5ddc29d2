"""Sends responses to batchers: answers to their requests, and reports of steps on their channels.

Sending blocks for a round trip through shared memory, which must not delay the engine: so it has a thread of its own.

`Channels` decides, without threads and clock; `Sender` is the thread. The rules:

- There is one channel per batcher. A report carries all frames that wait: when sending is slower than stepping, steps
  share a report, in order.
- Reports are numbered from 0 per channel; the first one is a heartbeat, sent when the channel opens.
- Every ``heartbeat_s`` a heartbeat is sent, with or without frames; before it the channel is checked for cancellation.
- When rows come or go, every channel gets the new load within `LOAD_UPDATE_S`, with frames or without: batchers share
  the worker.
- A second channel of the same batcher replaces the first, and its waiting frames are dropped: a batcher that lost its
  channel sends its rows again.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Condition
from typing import Final, Protocol

from sluice.internal.v1 import frame_pb2, worker_pb2

REPORT_FRAMES_MAX: Final = 1024
"""Most frames in one report; more wait for the next one."""

BACKLOG_FRAMES_MAX: Final = 4096
"""With this many frames waiting on all channels the engine waits before its next step."""


LOAD_UPDATE_S: Final = 0.05
"""A batcher without frames gets a changed load after this time, seconds."""


class ResponseSender(Protocol):
    """Sends the responses to one request of a batcher. `send` may block for a moment."""

    def send(self, response: worker_pb2.WorkerResponse, *, last: bool = False) -> None:
        """Sends ``response``; after the last one the request is over."""

    def close(self) -> None:
        """Ends the request without another response."""

    def is_cancelled(self) -> bool:
        """Whether the batcher has cancelled the request."""


@dataclass(eq=False)
class Channel:
    """The open channel of one batcher. Times are monotonic seconds."""

    batcher: str
    responses: ResponseSender
    heartbeat_s: float
    heartbeat_at: float
    load_update_at: float = math.inf
    sequence: int = 0
    waiting: list[frame_pb2.Frame] = field(default_factory=list)


@dataclass(frozen=True)
class DueReport:
    """One report to send. Before a heartbeat the channel is checked for cancellation."""

    channel: Channel
    report: worker_pb2.StepReport
    is_heartbeat: bool


class Channels:
    """All channels of a worker; see the rules above."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._load = worker_pb2.WorkerLoad()
        self._channels: dict[str, Channel] = {}

    @property
    def backlog(self) -> int:
        """Frames that wait to be sent."""
        return sum(len(channel.waiting) for channel in self._channels.values())

    def __contains__(self, batcher: str) -> bool:
        return batcher in self._channels

    def open(
        self, batcher: str, responses: ResponseSender, heartbeat_s: float, now: float
    ) -> ResponseSender | None:
        """Opens a channel, first heartbeat due at once; returns the sender of the one it replaces, to be closed."""
        old = self._channels.get(batcher)
        self._channels[batcher] = Channel(batcher, responses, heartbeat_s, heartbeat_at=now)
        return None if old is None else old.responses

    def drop(self, channel: Channel) -> bool:
        """Removes a channel; False when it was replaced or removed before."""
        if self._channels.get(channel.batcher) is not channel:
            return False
        del self._channels[channel.batcher]
        return True

    def drain(self) -> list[Channel]:
        """Removes all channels, and returns them."""
        channels = list(self._channels.values())
        self._channels.clear()
        return channels

    def set_load(self, load: worker_pb2.WorkerLoad, now: float) -> None:
        """Sets the load that reports carry."""
        known = (self._load.running, self._load.waiting)
        self._load = load
        if (load.running, load.waiting) != known:
            for channel in self._channels.values():
                channel.load_update_at = min(channel.load_update_at, now + LOAD_UPDATE_S)

    def post(self, batcher: str, frames: Iterable[frame_pb2.Frame]) -> None:
        """Adds frames; dropped when the batcher has no channel."""
        channel = self._channels.get(batcher)
        if channel is not None:
            channel.waiting.extend(frames)

    def due(self, now: float) -> list[DueReport]:
        """The reports to send now."""
        return [
            self._report(channel, now)
            for channel in self._channels.values()
            if channel.waiting or min(channel.heartbeat_at, channel.load_update_at) <= now
        ]

    def next_due(self) -> float | None:
        """When the next report without frames is due; None without channels."""
        return min(
            (
                min(channel.heartbeat_at, channel.load_update_at)
                for channel in self._channels.values()
            ),
            default=None,
        )

    def _report(self, channel: Channel, now: float) -> DueReport:
        is_heartbeat = channel.heartbeat_at <= now
        if is_heartbeat:
            channel.heartbeat_at = now + channel.heartbeat_s
        channel.load_update_at = math.inf
        frames = list(islice(channel.waiting, REPORT_FRAMES_MAX))
        del channel.waiting[: len(frames)]
        report = worker_pb2.StepReport(
            worker=self.worker, sequence=channel.sequence, frames=frames, load=self._load
        )
        channel.sequence += 1
        return DueReport(channel, report, is_heartbeat)


log = logging.getLogger(__name__)

BACKLOG_WAIT_S: Final = 1.0
"""Longest wait of the engine for the sender before it looks for commands again, seconds."""


class Sender:
    """Owns the channels; every method may be called from any thread. `run` is the thread.

    ``on_lost`` is called with a batcher's id and the time when its channel was found cancelled.
    """

    def __init__(
        self, channels: Channels, clock: Callable[[], float], on_lost: Callable[[str, float], None]
    ) -> None:
        self._channels = channels
        self._clock = clock
        self._on_lost = on_lost
        self._answers: deque[tuple[ResponseSender, worker_pb2.WorkerResponse | None]] = deque()
        self._changed = Condition()
        self._stopping = False

    def open(self, batcher: str, responses: ResponseSender, heartbeat_s: float) -> None:
        """Opens the channel of a batcher; ends the one it replaces."""
        with self._changed:
            replaced = self._channels.open(batcher, responses, heartbeat_s, self._clock())
            if replaced is not None:
                self._answers.append((replaced, None))
            self._changed.notify_all()

    def has_channel(self, batcher: str) -> bool:
        """Whether this batcher has an open channel."""
        with self._changed:
            return batcher in self._channels

    def answer(self, responses: ResponseSender, response: worker_pb2.WorkerResponse) -> None:
        """Sends the only response to a request."""
        with self._changed:
            self._answers.append((responses, response))
            self._changed.notify_all()

    def post(
        self, frames: Mapping[str, Sequence[frame_pb2.Frame]], load: worker_pb2.WorkerLoad
    ) -> None:
        """Takes the frames of a step, by batcher, and the load after it."""
        with self._changed:
            self._channels.set_load(load, self._clock())
            for batcher, messages in frames.items():
                self._channels.post(batcher, messages)
            self._changed.notify_all()

    def has_room(self) -> bool:
        """Waits a bounded time until the backlog is below its limit; whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._channels.backlog < BACKLOG_FRAMES_MAX, BACKLOG_WAIT_S
            )

    def stop(self) -> None:
        """Lets `run` send what waits, end all requests and return."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        """Sends until `stop`."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, self._seconds_until_due())
                stopping = self._stopping
                answers, self._answers = self._answers, deque()
                reports = self._channels.due(self._clock())
                self._changed.notify_all()
            for responses, response in answers:
                self._try(lambda p=responses, r=response: _answer(p, r))  # type: ignore[misc]
            for due in reports:
                self._try(lambda p=due: self._deliver(p))  # type: ignore[misc]
            if stopping and not answers and not reports:
                break
        self._close_all()

    def _has_work(self) -> bool:
        waits = bool(self._answers) or self._channels.backlog > 0
        return self._stopping or waits or self._seconds_until_due() == 0

    def _seconds_until_due(self) -> float | None:
        """Seconds until the next report is due; None without channels."""
        due_at = self._channels.next_due()
        return None if due_at is None else max(0.0, due_at - self._clock())

    def _deliver(self, due: DueReport) -> None:
        channel = due.channel
        if due.is_heartbeat and channel.responses.is_cancelled():
            self._lose(channel)
        else:
            channel.responses.send(worker_pb2.WorkerResponse(step=due.report))

    def _lose(self, channel: Channel) -> None:
        with self._changed:
            lost_at = self._clock()
            was_open = self._channels.drop(channel)
        if was_open:
            log.info("the channel of batcher %s was cancelled", channel.batcher)
            self._on_lost(channel.batcher, lost_at)
            channel.responses.close()

    def _close_all(self) -> None:
        with self._changed:
            channels = self._channels.drain()
        for channel in channels:
            self._try(channel.responses.close)

    def _try(self, send: Callable[[], None]) -> None:
        # Triton refuses a response whose request is gone; the thread must continue.
        try:
            send()
        except Exception:
            log.exception("a response could not be sent")


def _answer(responses: ResponseSender, response: worker_pb2.WorkerResponse | None) -> None:
    if response is None:
        responses.close()
    else:
        responses.send(response, last=True)
