"""The channels of a worker: which report is due on which channel, and what it carries. No threads, no clock.

- A batcher has one channel. Its request may be replaced by another one (`OpenChannel.renews`).
- A report carries all frames that are due. If sending is slower than stepping, steps share a report, in order, and the
  steps of a sequence share a frame.
- Frames that must not be delayed are due at once (`SequenceSpec.delay_s`: the first token of a streamed answer, the end
  of a most urgent sequence). Other tokens are coalesced by `ReportDelays`, so that batches of such sequences cost few
  messages and urgent frames meet short queues everywhere behind the worker.
- Reports are numbered from 0 per channel. The first one is a heartbeat, sent when the channel opens.
- A heartbeat is sent every `heartbeat_s`, or every `idle_s` while the worker has no sequence and the engine has
  accepted all batches of the channel. Before a heartbeat the channel is checked for cancellation.
- Every channel gets a changed load, because batchers share the worker; see `ReportDelays.load_s`. Admissions are sent
  within `update_s`, at once if tasks were refused.
- A second channel of a batcher replaces the first and drops its frames: a batcher that lost its channel sends its tasks
  again. Until the engine serves the new channel, its reports carry no frames, admissions or grants.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from model_workers import messages
from model_workers.engine.protocol import SequenceStep
from model_workers.grants import Grant
from sluice.internal.v1 import frame_pb2, worker_pb2

REPORT_FRAMES_MAX: Final = 1024
"""Maximum number of frames in a report; further ones go with the next report."""
COALESCED_TOKENS_MAX: Final = 256
"""Tokens at which a coalesced frame is complete: bounds what a lost worker loses, and the size of a frame."""

Posted = tuple[SequenceStep, frame_pb2.Final | None]
"""A step of a sequence, and its final frame if the sequence has ended."""


class ResponseSender(Protocol):
    """Sends the responses to one request of a batcher. `send` may block for a moment."""

    def send(self, report: worker_pb2.StepReport) -> None:
        """Send a report."""

    def close(self) -> None:
        """End the request."""

    def is_cancelled(self) -> bool:
        """Return whether the batcher has cancelled the request."""


@dataclass(frozen=True)
class ReportDelays:
    """All delays by which reports are coalesced: the worker's part of the latency budget.

    Attributes:
        soon_s: Maximum delay of ends of coalescing sequences and of free capacity, in seconds.
        update_s: Maximum delay of any other change of the load, and of admissions, in seconds.
        grid_s: Coalesced tokens of all sequences are due at multiples of this time, in seconds, so that they share
            reports. Those with a shorter coalescing time are due at multiples of that.
    """

    soon_s: float = 0.01
    update_s: float = 0.05
    grid_s: float = 0.25

    def tokens_due_at(self, now: float, coalesce_s: float) -> float:
        """Return when tokens that are coalesced from `now` on are due."""
        grid_s = min(coalesce_s, self.grid_s)
        return (now + coalesce_s) // grid_s * grid_s if grid_s else now

    def end_s(self, coalesce_s: float) -> float:
        """Return how long the end of a sequence may be delayed, in seconds."""
        return min(coalesce_s, self.soon_s)

    def load_s(self, before: worker_pb2.WorkerLoad, load: worker_pb2.WorkerLoad) -> float:
        """Return how long a changed load may be delayed, in seconds; infinite if it can wait for the next report."""
        ended = before.running + before.waiting - load.running - load.waiting
        if load.waiting_tokens < before.waiting_tokens:
            # With all prompts computed, the next tasks may wait at the batcher for exactly this report.
            return self.soon_s if load.waiting_tokens else 0.0
        if ended > 0:
            return self.soon_s
        changed = (load.running, load.waiting) != (before.running, before.waiting)
        return self.update_s if changed else math.inf


DELAYS: Final = ReportDelays()


@dataclass(slots=True)
class CoalescedFrame:
    """Tokens of a sequence that may grow until they are due."""

    frame: frame_pb2.Frame
    due_at: float


@dataclass(eq=False)
class Channel:
    """The open channel of one batcher. Times are monotonic seconds.

    Attributes:
        frames: Complete frames, due at `frames_at`.
        coalesced: Growing frames by request; the first of them is due at `coalesced_at`.
        load_update_at: When load, grants and admissions are due.
        pending_batches: Batches that have arrived and that the engine has not accepted yet.
    """

    batcher: str
    epoch: int
    responses: ResponseSender
    heartbeat_s: float
    idle_s: float
    heartbeat_at: float
    load_update_at: float = math.inf
    frames_at: float = math.inf
    coalesced_at: float = math.inf
    sequence: int = 0
    ready: bool = False
    frames: list[frame_pb2.Frame] = field(default_factory=list)
    coalesced: dict[str, CoalescedFrame] = field(default_factory=dict)
    admissions: list[worker_pb2.Admission] = field(default_factory=list)
    pending_batches: int = 0
    grant: Grant = field(default_factory=Grant)

    @property
    def due_at(self) -> float:
        """When the next report is due."""
        return min(self.frames_at, self.coalesced_at, self.load_update_at, self.heartbeat_at)

    def post(self, step: SequenceStep, final: frame_pb2.Final | None, now: float) -> None:
        """Add a step of a sequence."""
        name = step.request_id
        growing = self.coalesced.get(name)
        # Tokens of the same attempt join the frame that waits; a frame of another attempt replaces it.
        if growing is not None and growing.frame.attempt == step.attempt:
            frame = growing.frame
            messages.extend(frame, step)
        else:
            frame, growing = messages.frame(step), None
        # The sequence goes on and its frame may still grow: wait until it is due.
        if final is None and len(frame.token_ids) < COALESCED_TOKENS_MAX:
            if growing is None:
                due_at = DELAYS.tokens_due_at(now, step.delay_s)
                self.coalesced[name] = CoalescedFrame(frame, due_at)
                self.coalesced_at = min(self.coalesced_at, due_at)
            return
        if final is not None:
            frame.final.CopyFrom(final)
        self.coalesced.pop(name, None)
        self.frames.append(frame)
        self.frames_at = min(self.frames_at, now + DELAYS.end_s(step.delay_s))

    def take(self, now: float) -> list[frame_pb2.Frame]:
        """Remove and return the frames of a report that is sent now."""
        # Frames that are due join those that are complete, in the order of their sequences.
        if self.coalesced_at <= now:
            due = [name for name, entry in self.coalesced.items() if entry.due_at <= now]
            self.frames += [self.coalesced.pop(name).frame for name in due]
            times = (entry.due_at for entry in self.coalesced.values())
            self.coalesced_at = min(times, default=math.inf)
        frames = self.frames[:REPORT_FRAMES_MAX]
        del self.frames[:REPORT_FRAMES_MAX]
        self.frames_at = now if self.frames else math.inf
        return frames


@dataclass(frozen=True)
class DueReport:
    """A report to send now."""

    channel: Channel
    report: worker_pb2.StepReport
    is_heartbeat: bool


class Channels:
    """All channels of a worker; the module has the rules."""

    def __init__(self, worker: str, counts: worker_pb2.WorkerCounts | None = None) -> None:
        """Create the channels of `worker`; heartbeats carry `counts`."""
        self.worker = worker
        self._counts = counts
        self._load = worker_pb2.WorkerLoad()
        self._channels: dict[str, Channel] = {}

    @property
    def backlog(self) -> int:
        """Number of complete frames that are not sent."""
        return sum(len(channel.frames) for channel in self._channels.values())

    def get(self, batcher: str, epoch: int) -> Channel | None:
        """Return the channel of a batcher if it has this epoch."""
        channel = self._channels.get(batcher)
        return channel if channel is not None and channel.epoch == epoch else None

    def open(
        self, opening: worker_pb2.OpenChannel, responses: ResponseSender, now: float
    ) -> ResponseSender | None:
        """Open or renew a channel; return the sender of the request to end: `responses` if it is outdated; None: none.

        A renewed channel keeps everything that it has not sent.
        """
        batcher, heartbeat_ms = opening.batcher, opening.heartbeat_ms
        current = self._channels.get(batcher)
        # Only the request behind the channel is replaced; what was not sent goes over the new one.
        if opening.renews:
            renewed = self.get(batcher, opening.epoch)
            if renewed is None:
                return responses  # the channel was lost or replaced meanwhile
            older, renewed.responses = renewed.responses, responses
            return older
        if current is not None and current.epoch > opening.epoch:
            return responses  # a newer channel overtook this request
        idle_ms = max(heartbeat_ms, opening.idle_heartbeat_ms)
        self._channels[batcher] = Channel(
            batcher, opening.epoch, responses, heartbeat_ms / 1e3, idle_ms / 1e3, heartbeat_at=now
        )
        return None if current is None else current.responses

    def ready(self) -> list[Channel]:
        """Return the channels that the engine serves."""
        return [channel for channel in self._channels.values() if channel.ready]

    def drop(self, channel: Channel) -> bool:
        """Remove a channel; return False if it was replaced or removed before."""
        if self._channels.get(channel.batcher) is not channel:
            return False
        del self._channels[channel.batcher]
        return True

    def drain(self) -> list[Channel]:
        """Remove all channels and return them."""
        channels = list(self._channels.values())
        self._channels.clear()
        return channels

    def set_load(self, load: worker_pb2.WorkerLoad, now: float) -> None:
        """Set the load that reports carry."""
        due_at = now + DELAYS.load_s(self._load, load)
        self._load = load
        for channel in self._channels.values():
            channel.load_update_at = min(channel.load_update_at, due_at)
            channel.heartbeat_at = min(channel.heartbeat_at, now + channel.heartbeat_s)

    def grant(self, batcher: str, grant: Grant, now: float) -> None:
        """Set the grant of a batcher, due soon if its queued tasks get more or if batchers came or went."""
        channel = self._channels.get(batcher)
        if channel is None or channel.grant == grant:
            return
        before = channel.grant.tasks or (0,) * len(grant.tasks)
        grew = any(map(operator.gt, grant.tasks, before))
        soon = (grew and grant.is_wanted) or grant.batchers != channel.grant.batchers
        delay_s = DELAYS.soon_s if soon else DELAYS.update_s
        channel.grant = grant
        channel.load_update_at = min(channel.load_update_at, now + delay_s)

    def post(self, batcher: str, steps: Iterable[Posted], now: float) -> None:
        """Add steps; drop them if the engine does not serve the batcher's channel."""
        # Without a served channel the batcher has lost these sequences and sends them elsewhere.
        channel = self._channels.get(batcher)
        if channel is not None and channel.ready:
            for step, final in steps:
                channel.post(step, final, now)

    def expect(self, batcher: str, epoch: int, now: float) -> None:
        """Count a batch that has arrived: heartbeats show that the worker lives until the engine accepts it."""
        channel = self.get(batcher, epoch)
        if channel is not None:
            channel.pending_batches += 1
            channel.heartbeat_at = min(channel.heartbeat_at, now + channel.heartbeat_s)

    def admit(self, batcher: str, admissions: Iterable[worker_pb2.Admission], now: float) -> None:
        """Add admissions."""
        channel = self._channels.get(batcher)
        if channel is None or not channel.ready:
            return
        for admission in admissions:
            channel.pending_batches -= 1
            channel.admissions.append(admission)
            due_at = now if admission.refused else now + DELAYS.update_s
            channel.load_update_at = min(channel.load_update_at, due_at)

    def due(self, now: float) -> list[DueReport]:
        """Return the reports to send now; what they carry leaves the channels."""
        channels = self._channels.values()
        return [self._report(channel, now) for channel in channels if channel.due_at <= now]

    def next_due(self) -> float | None:
        """Return when the next report is due; None without channels."""
        return min((channel.due_at for channel in self._channels.values()), default=None)

    def _report(self, channel: Channel, now: float) -> DueReport:
        is_heartbeat = channel.heartbeat_at <= now
        if is_heartbeat:
            idle = not (self._load.running or self._load.waiting or channel.pending_batches)
            channel.heartbeat_at = now + (channel.idle_s if idle else channel.heartbeat_s)
        channel.load_update_at = math.inf
        report = worker_pb2.StepReport(
            worker=self.worker,
            sequence=channel.sequence,
            frames=channel.take(now),
            load=self._load,
            admissions=channel.admissions,
            ready=channel.ready,
            counts=self._counts if is_heartbeat else None,
            task_grants=channel.grant.tasks if channel.ready else (),
            token_grants=channel.grant.tokens if channel.ready else (),
        )
        channel.admissions = []
        channel.sequence += 1
        return DueReport(channel, report, is_heartbeat)
