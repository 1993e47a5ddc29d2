"""The channels of a worker: one per batcher, with the frames that wait to be sent on it.

No threads and no clock in here; `model_workers.sender` drives it. The rules:

- A report carries all frames that wait: when sending is slower than stepping, steps share a report, in order.
- Reports are numbered from 0 per channel; the first one is a heartbeat, sent when the channel opens.
- Every ``heartbeat_s`` a heartbeat goes out, with or without frames since the last one, and whoever sends it looks
  whether the batcher is still there.
- When rows come or go, every channel hears of it within `NEWS_S`, with frames or without: batchers share the worker.
- A second channel of the same batcher takes the place of the first, and what waited on that one is gone: a batcher that
  lost its channel sends its rows again.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

from sluice.internal.v1 import frame_pb2, worker_pb2

REPORT_FRAMES_MAX: Final = 1024
"""Most frames in one report; more wait for the next one."""

BACKLOG_FRAMES_MAX: Final = 4096
"""With this many frames waiting on all channels the engine waits before its next step."""


NEWS_S: Final = 0.05
"""A batcher without frames hears of another load this soon, and no more often, seconds."""


class Port(Protocol):
    """Where responses to one request of a batcher go. `send` may block for a moment."""

    def send(self, response: worker_pb2.WorkerResponse, *, last: bool = False) -> None:
        """Sends ``response``; after the last one the request is over."""

    def close(self) -> None:
        """Ends the request without another response."""

    def is_cancelled(self) -> bool:
        """Whether the batcher has gone."""


@dataclass(eq=False)
class Channel:
    """The open channel of one batcher. Times are monotonic seconds."""

    batcher: str
    port: Port
    heartbeat_s: float
    beat_at: float
    news_at: float = math.inf
    sequence: int = 0
    waiting: list[frame_pb2.Frame] = field(default_factory=list)


@dataclass(frozen=True)
class Parcel:
    """One report to send. With ``beat`` set, look first whether the batcher is still there."""

    channel: Channel
    report: worker_pb2.StepReport
    beat: bool


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

    def open(self, batcher: str, port: Port, heartbeat_s: float, now: float) -> Port | None:
        """Opens a channel, first heartbeat due at once; returns the port of the one it replaces, to be closed."""
        old = self._channels.get(batcher)
        self._channels[batcher] = Channel(batcher, port, heartbeat_s, beat_at=now)
        return None if old is None else old.port

    def drop(self, channel: Channel) -> bool:
        """Forgets a channel; False when another one has taken its place, or it was forgotten before."""
        if self._channels.get(channel.batcher) is not channel:
            return False
        del self._channels[channel.batcher]
        return True

    def drain(self) -> list[Channel]:
        """Forgets all channels, and returns them."""
        channels = list(self._channels.values())
        self._channels.clear()
        return channels

    def take_load(self, load: worker_pb2.WorkerLoad, now: float) -> None:
        """The load from now on."""
        known = (self._load.running, self._load.waiting)
        self._load = load
        if (load.running, load.waiting) != known:
            for channel in self._channels.values():
                channel.news_at = min(channel.news_at, now + NEWS_S)

    def post(self, batcher: str, frames: Iterable[frame_pb2.Frame]) -> None:
        """Adds frames; without a channel nobody waits for them, and they are dropped."""
        channel = self._channels.get(batcher)
        if channel is not None:
            channel.waiting.extend(frames)

    def due(self, now: float) -> list[Parcel]:
        """What is to be sent now."""
        return [
            self._parcel(channel, now)
            for channel in self._channels.values()
            if channel.waiting or min(channel.beat_at, channel.news_at) <= now
        ]

    def next_due(self) -> float | None:
        """When the next report without frames is due; None without channels."""
        return min(
            (min(channel.beat_at, channel.news_at) for channel in self._channels.values()),
            default=None,
        )

    def _parcel(self, channel: Channel, now: float) -> Parcel:
        beat = channel.beat_at <= now
        if beat:
            channel.beat_at = now + channel.heartbeat_s
        channel.news_at = math.inf
        frames = list(islice(channel.waiting, REPORT_FRAMES_MAX))
        del channel.waiting[: len(frames)]
        report = worker_pb2.StepReport(
            worker=self.worker, sequence=channel.sequence, frames=frames, load=self._load
        )
        channel.sequence += 1
        return Parcel(channel, report, beat)
