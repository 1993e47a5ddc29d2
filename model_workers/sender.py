"""Sends reports to batchers on their channels, and ends their other requests.

Sending blocks for a round trip through shared memory, which must not delay the engine: so it has a thread of its own.

`Channels` decides, without threads and clock; `Sender` is the thread. The rules:

- There is one channel per batcher; its request may be replaced by another one (`OpenChannel.renews`).
- A report carries all frames that are due: when sending is slower than stepping, steps share a report, in order, and
  those of a row a frame.
- Frames that may not wait are due at once (`SequenceSpec.wait_s`: the first token of an answer, the end of an urgent row).
  Others gather the tokens of their row until its time is over; an end waits `SOON_S` at most, and `GATHER_TOKENS_MAX`
  tokens go as they are. So full batches of such rows cost few messages, and urgent frames meet short queues everywhere
  behind the worker.
- Reports are numbered from 0 per channel; the first one is a heartbeat, sent when the channel opens.
- A heartbeat is sent every ``heartbeat_s``, with or without frames, or every ``idle_s`` while the worker has no rows,
  and no batch of the channel that its engine has not taken; before it the channel is checked for cancellation.
- When rows come or go, every channel gets the new load within `LOAD_UPDATE_S`, with frames or without: batchers share
  the worker. There is room for more within `SOON_S`, and at once when all prompts are computed: the next ones may be
  waiting for that. Admissions are sent within `LOAD_UPDATE_S`, at once when rows were refused.
- A second channel of the same batcher replaces the first, and its waiting frames are dropped: a batcher that lost its
  channel sends its rows again. Until the engine has taken note of the second one it carries heartbeats only.
- When the engine hangs its channels are ended: batchers send their rows elsewhere. The engine may go on and serve new
  channels; if it does not, the process is of no use.
"""

import faulthandler
import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition
from types import MappingProxyType
from typing import Final, Protocol

from model_workers import messages
from model_workers.engine.protocol import SequenceStep
from model_workers.grants import Grant
from model_workers.runners import Changes
from model_workers.watchdog import TICK_S, Watchdog
from sluice.internal.v1 import frame_pb2, worker_pb2

REPORT_FRAMES_MAX: Final = 1024
"""Most frames in one report; more wait for the next one."""

BACKLOG_FRAMES_MAX: Final = 4096
"""With this many frames waiting on all channels the engine waits before its next step."""

LOAD_UPDATE_S: Final = 0.05
"""A batcher without frames gets a changed load after this time, seconds."""

SOON_S: Final = 0.01
"""Ends of rows that gather, and news of free slots, wait for others at most this long, seconds."""

GATHER_TOKENS_MAX: Final = 256
"""A row that has gathered so many tokens sends them: more are not lost with a worker, nor larger a message."""

GATHER_GRID_S: Final = 0.25
"""Gathered tokens go at multiples of this, or of the time that they are gathered, seconds."""

Posted = tuple[SequenceStep, frame_pb2.Final | None]
"""What a step did to a row, and its end in a frame, if it has ended."""


class ResponseSender(Protocol):
    """Sends the responses to one request of a batcher. `send` may block for a moment."""

    def send(self, report: worker_pb2.StepReport) -> None:
        """Sends a report."""

    def close(self) -> None:
        """Ends the request."""

    def is_cancelled(self) -> bool:
        """Whether the batcher has cancelled the request."""


@dataclass(slots=True)
class Gathered:
    """The tokens of a row that wait for more, and when they go."""

    frame: frame_pb2.Frame
    due_at: float


@dataclass(eq=False)
class Channel:
    """The open channel of one batcher. Times are monotonic seconds.

    Attributes:
        waiting: frames to go at ``waiting_at``, of rows that have ended or gathered enough.
        gathered: by request, those that still grow; the first goes at ``gathered_at``.
        untaken: batches that have come, and that the engine has not taken yet.
    """

    batcher: str
    epoch: int
    responses: ResponseSender
    heartbeat_s: float
    idle_s: float
    heartbeat_at: float
    load_update_at: float = math.inf
    waiting_at: float = math.inf
    gathered_at: float = math.inf
    sequence: int = 0
    ready: bool = False
    waiting: list[frame_pb2.Frame] = field(default_factory=list)
    gathered: dict[str, Gathered] = field(default_factory=dict)
    admissions: list[worker_pb2.Admission] = field(default_factory=list)
    untaken: int = 0
    grant: Grant = field(default_factory=Grant)

    @property
    def due_at(self) -> float:
        """When the next report is due."""
        return min(self.waiting_at, self.gathered_at, self.load_update_at, self.heartbeat_at)

    def post(self, step: SequenceStep, final: frame_pb2.Final | None, now: float) -> None:
        """Takes a step of a row."""
        name, gather_s = step.request_id, step.wait_s
        gathered = self.gathered.get(name)
        if gathered is not None and gathered.frame.attempt == step.attempt:
            frame = gathered.frame
            messages.extend(frame, step)
        else:
            frame = messages.frame(step)
        if final is None and len(frame.token_ids) < GATHER_TOKENS_MAX:
            if gathered is None or gathered.frame is not frame:
                due_at = gathered_until(now, gather_s)
                self.gathered[name] = Gathered(frame, due_at)
                self.gathered_at = min(self.gathered_at, due_at)
            return
        if final is not None:
            frame.final.CopyFrom(final)
        self.gathered.pop(name, None)
        self.waiting.append(frame)
        self.waiting_at = min(self.waiting_at, now + end_wait_s(gather_s))

    def take(self, now: float) -> list[frame_pb2.Frame]:
        """The frames of a report now; more may wait for the next one."""
        if self.gathered_at <= now:
            due = [name for name, gathered in self.gathered.items() if gathered.due_at <= now]
            self.waiting += [self.gathered.pop(name).frame for name in due]
            times = (gathered.due_at for gathered in self.gathered.values())
            self.gathered_at = min(times, default=math.inf)
        frames = self.waiting[:REPORT_FRAMES_MAX]
        del self.waiting[:REPORT_FRAMES_MAX]
        self.waiting_at = now if self.waiting else math.inf
        return frames


def gathered_until(now: float, gather_s: float) -> float:
    """When tokens that are gathered from ``now`` on go: rounded down, so that rows go together; 0 s: now."""
    grid_s = min(gather_s, GATHER_GRID_S)
    return (now + gather_s) // grid_s * grid_s if grid_s else now


def end_wait_s(gather_s: float) -> float:
    """How long the end of a row may wait for others, seconds."""
    return min(gather_s, SOON_S)


def _update_s(before: worker_pb2.WorkerLoad, load: worker_pb2.WorkerLoad) -> float:
    """How long batchers may wait for a new load, seconds."""
    rows = load.running + load.waiting - before.running - before.waiting
    if load.waiting_tokens < before.waiting_tokens:
        return SOON_S if load.waiting_tokens else 0.0
    if rows < 0:
        return SOON_S
    changed = (load.running, load.waiting) != (before.running, before.waiting)
    return LOAD_UPDATE_S if changed else math.inf


@dataclass(frozen=True)
class DueReport:
    """One report to send. Before a heartbeat the channel is checked for cancellation."""

    channel: Channel
    report: worker_pb2.StepReport
    is_heartbeat: bool


class Channels:
    """All channels of a worker; see the rules above."""

    def __init__(
        self, worker: str, counts: Callable[[], worker_pb2.WorkerCounts | None] = lambda: None
    ) -> None:
        """``counts``: what heartbeats say of the work so far."""
        self.worker = worker
        self._counts = counts
        self._load = worker_pb2.WorkerLoad()
        self._channels: dict[str, Channel] = {}

    @property
    def backlog(self) -> int:
        """Frames that wait to be sent."""
        return sum(len(channel.waiting) for channel in self._channels.values())

    def get(self, batcher: str, epoch: int) -> Channel | None:
        """The open channel of a batcher, unless it is another one by now."""
        channel = self._channels.get(batcher)
        return channel if channel is not None and channel.epoch == epoch else None

    def open(
        self, opening: worker_pb2.OpenChannel, responses: ResponseSender, now: float
    ) -> ResponseSender | None:
        """Opens a channel, first heartbeat due at once; returns the sender of the older one, to be closed.

        One that renews a channel takes over its place in the reports, with all that waits for them.
        """
        batcher, heartbeat_ms = opening.batcher, opening.heartbeat_ms
        other = self._channels.get(batcher)
        if opening.renews:
            known = self.get(batcher, opening.epoch)
            if known is None:
                return responses  # It was lost, or replaced.
            older, known.responses = known.responses, responses
            return older
        if other is not None and other.epoch > opening.epoch:
            return responses  # It was overtaken.
        idle_ms = max(heartbeat_ms, opening.idle_heartbeat_ms)
        self._channels[batcher] = Channel(
            batcher, opening.epoch, responses, heartbeat_ms / 1e3, idle_ms / 1e3, heartbeat_at=now
        )
        return None if other is None else other.responses

    def ready(self) -> list[Channel]:
        """Channels that the engine serves."""
        return [channel for channel in self._channels.values() if channel.ready]

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
        before, self._load = self._load, load
        due_at = now + _update_s(before, load)
        for channel in self._channels.values():
            channel.load_update_at = min(channel.load_update_at, due_at)
            channel.heartbeat_at = min(channel.heartbeat_at, now + channel.heartbeat_s)

    def grant(self, batcher: str, grant: Grant, now: float) -> None:
        """Sets what a batcher may send.

        One whose rows wait hears of more `SOON_S` later at most, and all do when a batcher comes or goes.
        """
        channel = self._channels.get(batcher)
        if channel is None or channel.grant == grant:
            return
        grew = any(map(operator.gt, grant.rows, channel.grant.rows or (0,) * len(grant.rows)))
        soon = (grew and grant.waits) or grant.among != channel.grant.among
        wait_s = SOON_S if soon else LOAD_UPDATE_S
        channel.grant = grant
        channel.load_update_at = min(channel.load_update_at, now + wait_s)

    def post(self, batcher: str, steps: Iterable[Posted], now: float) -> None:
        """Adds steps; dropped when the batcher has no channel, or a newer one than they are for."""
        channel = self._channels.get(batcher)
        if channel is not None and channel.ready:
            for step, final in steps:
                channel.post(step, final, now)

    def expect(self, batcher: str, epoch: int, now: float) -> None:
        """A batch has come: its batcher hears that the worker lives until the engine takes it, and on from there."""
        channel = self.get(batcher, epoch)
        if channel is not None:
            channel.untaken += 1
            channel.heartbeat_at = min(channel.heartbeat_at, now + channel.heartbeat_s)

    def admit(self, batcher: str, admissions: Iterable[worker_pb2.Admission], now: float) -> None:
        """Adds admissions."""
        channel = self._channels.get(batcher)
        if channel is None or not channel.ready:
            return
        for admission in admissions:
            channel.untaken -= 1
            channel.admissions.append(admission)
            due_at = now if admission.refused else now + LOAD_UPDATE_S
            channel.load_update_at = min(channel.load_update_at, due_at)

    def due(self, now: float) -> list[DueReport]:
        """The reports to send now."""
        return [
            self._report(channel, now)
            for channel in self._channels.values()
            if channel.due_at <= now
        ]

    def next_due(self) -> float | None:
        """When the next report is due; None without channels."""
        return min((channel.due_at for channel in self._channels.values()), default=None)

    def _report(self, channel: Channel, now: float) -> DueReport:
        is_heartbeat = channel.heartbeat_at <= now
        if is_heartbeat:
            idle = not (self._load.running or self._load.waiting or channel.untaken)
            channel.heartbeat_at = now + (channel.idle_s if idle else channel.heartbeat_s)
        channel.load_update_at = math.inf
        report = worker_pb2.StepReport(
            worker=self.worker,
            sequence=channel.sequence,
            frames=channel.take(now),
            load=self._load,
            admissions=channel.admissions,
            ready=channel.ready,
            counts=self._counts() if is_heartbeat else None,
            task_grants=channel.grant.rows if channel.ready else (),
            token_grants=channel.grant.tokens if channel.ready else (),
        )
        channel.admissions = []
        channel.sequence += 1
        return DueReport(channel, report, is_heartbeat)


log = logging.getLogger(__name__)

BACKLOG_WAIT_S: Final = 1.0
"""Longest wait of the engine for the sender before it looks for commands again, seconds."""
IDLE_LOOK_S: Final = 1.0
"""How soon an engine is looked at that begins to work and says nothing, seconds."""
HANG_S: Final = 10.0
"""An engine that exceeds its limit by this much does not come back, seconds."""


class Sender:
    """Owns the channels. `run` is its thread, and every other method may be called from any thread.

    Without a thread `turn` is called whenever ``changed`` was notified, or `next_due` has come.
    """

    def __init__(
        self,
        channels: Channels,
        watchdog: Watchdog,
        clock: Callable[[], float],
        on_lost: Callable[[str, float], None],
        on_hang: Callable[[], None],
        changed: Changes | None = None,
    ) -> None:
        """The thread calls ``on_lost`` when a batcher's channel is gone since a moment.

        It calls ``on_hang`` when the engine does not come back.
        """
        self._channels = channels
        self._watchdog = watchdog
        self._clock = clock
        self._on_lost, self._on_hang = on_lost, on_hang
        self._ends: deque[ResponseSender] = deque()
        self._changed: Changes = changed or Condition()
        self._stopping = False

    def open(self, opening: worker_pb2.OpenChannel, responses: ResponseSender) -> None:
        """Opens or renews the channel of a batcher; ends the older request."""
        with self._changed:
            older = self._channels.open(opening, responses, self._clock())
            if older is not None:
                self._ends.append(older)
            self._changed.notify_all()

    def make_ready(self, batcher: str, epoch: int) -> None:
        """The engine serves this channel from now on; nothing happens when there is another one by now."""
        with self._changed:
            channel = self._channels.get(batcher, epoch)
            if channel is not None:
                channel.ready = True
                channel.load_update_at = -math.inf
                self._changed.notify_all()

    def has_channel(self, batcher: str, epoch: int) -> bool:
        """Whether this channel is open."""
        with self._changed:
            return self._channels.get(batcher, epoch) is not None

    def expect(self, batcher: str, epoch: int) -> None:
        """The engine has not taken a batch yet; what wakes the thread is the `end` of its request."""
        with self._changed:
            self._channels.expect(batcher, epoch, self._clock())

    def end(self, responses: ResponseSender) -> None:
        """Ends a request that is no channel, behind the reports that wait.

        On the thread that took it it would end sooner, and batchers would send more and smaller batches: with 32
        callers a one-token request then takes a quarter more CPU of all processes.
        """
        with self._changed:
            self._ends.append(responses)
            self._changed.notify_all()

    def post(
        self,
        steps: Mapping[str, Sequence[Posted]],
        load: worker_pb2.WorkerLoad,
        admissions: Mapping[str, Sequence[worker_pb2.Admission]] = MappingProxyType({}),
        grants: Mapping[str, Grant] = MappingProxyType({}),
    ) -> None:
        """Takes what a step did, what was admitted before it and what is granted, by batcher; and the load."""
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
            if self._channels.next_due() != due_at:
                self._changed.notify_all()

    def has_room(self) -> bool:
        """Waits a bounded time until the backlog is below its limit; whether it is."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._channels.backlog < BACKLOG_FRAMES_MAX, BACKLOG_WAIT_S
            )
            return bool(has_room)

    def stop(self) -> None:
        """Lets `run` send what waits, end all requests and return."""
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
                ends, reports = self._take()
                self._changed.notify_all()
            self._send(ends, reports)
            self._look_at_engine()
            if stopping and not ends and not reports:
                break
        self.close()

    def turn(self) -> bool:
        """Send what is due; return whether there was anything."""
        ends, reports = self._take()
        self._send(ends, reports)
        return bool(reports)

    @property
    def next_due(self) -> float | None:
        """When the next report is due, in monotonic seconds; None without channels."""
        return self._channels.next_due()

    def _take(self) -> tuple[Sequence[ResponseSender], Sequence[DueReport]]:
        ends, self._ends = self._ends, deque()
        return ends, self._channels.due(self._clock())

    def _send(self, ends: Iterable[ResponseSender], reports: Iterable[DueReport]) -> None:
        for responses in ends:
            self._try(responses.close)
        for due in reports:
            self._deliver(due)

    def _seconds_until_due(self) -> float:
        """Seconds until the next report is due, or the engine is looked at."""
        due_at, look_s = self._channels.next_due(), TICK_S if self._watchdog.works else IDLE_LOOK_S
        return look_s if due_at is None else min(max(0.0, due_at - self._clock()), look_s)

    def _look_at_engine(self) -> None:
        overdue_s = self._watchdog.overdue_s(self._clock())
        if not overdue_s:
            return
        with self._changed:
            served = self._channels.ready()
        for channel in served:
            log.error("the engine hangs: the channel of batcher %s is ended", channel.batcher)
            self._lose(channel)
        if overdue_s > HANG_S:
            log.error("the engine does not come back; its stack:")
            faulthandler.dump_traceback()
            self._on_hang()

    def _deliver(self, due: DueReport) -> None:
        channel = due.channel
        gone = due.is_heartbeat and channel.responses.is_cancelled()
        if gone or not self._try(lambda: channel.responses.send(due.report)):
            log.info("the channel of batcher %s was cancelled", channel.batcher)
            self._lose(channel)

    def _lose(self, channel: Channel) -> None:
        with self._changed:
            lost_at = self._clock()
            was_open = self._channels.drop(channel)
        if was_open:
            self._on_lost(channel.batcher, lost_at)
            self._try(channel.responses.close)

    def close(self) -> None:
        """End all requests."""
        with self._changed:
            channels = self._channels.drain()
        for channel in channels:
            self._try(channel.responses.close)

    def _try(self, send: Callable[[], None]) -> bool:
        """Whether Triton took it; it refuses a response whose request is gone, and the thread must continue."""
        try:
            send()
        except Exception:
            log.exception("a response could not be sent")
            return False
        return True
