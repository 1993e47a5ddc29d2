"""A worker without a model: it prefills, draws a token a row and step, stalls, hangs, fails and dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from batcher.core.row import Row
from sluice.internal.v1 import frame_pb2, task_pb2, worker_pb2
from sluice.wire.subjects import CLASSES, RANKS
from tests.batcher.core.actors.requests import token

if TYPE_CHECKING:
    from tests.batcher.core.actors.shell import Line
    from tests.batcher.core.world import World

SLOTS: Final = 6
WAITING: Final = 3
"""Rows beyond those."""
STEP_S: Final = 0.05
PREFILL_TOKENS: Final = 40
"""Of one step."""
BLOCK_TOKENS: Final = 16
BLOCKS: Final = 40


@dataclass
class Computed:
    """A row in the worker."""

    task: task_pb2.Task
    owner: str
    attempt: int
    index: int
    to_prefill: int

    @property
    def blocks(self) -> int:
        return -(-(len(self.task.prompt_token_ids) + self.index) // BLOCK_TOKENS)


def computed(owner: str, row: Row) -> Computed:
    """What goes to the worker."""
    index = len(row.produced)
    return Computed(row.task, owner, row.attempt, index, len(row.task.prompt_token_ids) + index)


def ended(row: Computed, end: frame_pb2.RowEnd.ValueType) -> frame_pb2.Frame:
    """How a worker tells that it computes a row no more: late, and of the attempt that it had."""
    frame = frame_pb2.Frame(
        request_id=row.task.request_id, attempt=row.attempt, start_index=row.index
    )
    frame.final.end = end
    return frame


@dataclass
class Channel:
    """What a batcher hears."""

    line: Line
    opening: int
    sequence: int = 0
    ready: bool = False
    admissions: list[worker_pb2.Admission] = field(default_factory=list)


class Engine:
    """One worker of the model; its process has a number, and every batcher a channel to it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.epoch, self.steps, self.stalled, self.hangs = 0, 0, False, False
        self.fails_until = 0.0
        self.rows: dict[str, Computed] = {}
        self.endings: list[tuple[str, frame_pb2.Frame]] = []
        self.channels: dict[str, Channel] = {}
        self.inbox: list[Callable[[], None]] = []
        world.at(STEP_S, self.step)

    @property
    def worker(self) -> str:
        """What it calls itself."""
        return f"{self.name}.{self.epoch}"

    def load(self) -> worker_pb2.WorkerLoad:
        running = min(SLOTS, len(self.rows))
        used = sum(row.blocks for row in self.rows.values())
        return worker_pb2.WorkerLoad(
            slots=SLOTS,
            running=running,
            waiting=len(self.rows) - running,
            steps=self.steps,
            block_tokens=BLOCK_TOKENS,
            cache_blocks=BLOCKS,
            free_blocks=max(0, BLOCKS - used),
            waiting_tokens=sum(row.to_prefill for row in self.rows.values()),
            ranks=[self.rank_load(name) for name in CLASSES],
            places=SLOTS + WAITING,
        )

    def rank_load(self, priority_class: str) -> worker_pb2.RankLoad:
        running, load = self.running(), worker_pb2.RankLoad()
        for row in self.rows.values():
            if row.task.priority_class == priority_class:
                runs = row in running
                load.running += runs
                load.waiting += not runs
                load.running_tokens += runs * row.blocks * BLOCK_TOKENS
                load.waiting_tokens += row.to_prefill
        return load

    def running(self) -> list[Computed]:
        """Rows in slots: the most urgent ones; others have given way."""
        return sorted(self.rows.values(), key=lambda row: RANKS[row.task.priority_class])[:SLOTS]

    def when_awake(self, act: Callable[[], None]) -> bool:
        """A stalled worker finds its messages when it wakes."""
        if self.stalled:
            self.world.at(0.5, act)
        return self.stalled

    # What batchers send.

    def open(self, line: Line, opening: int) -> None:
        if self.when_awake(partial(self.open, line, opening)):
            return
        before = self.channels.get(line.owner)
        if before is not None and before.opening > opening:
            return
        self.channels[line.owner] = Channel(line, opening)
        self.report(line.owner, [])
        self.inbox.append(partial(self.serve, line.owner, opening))

    def batch(self, line: Line, opening: int, batch_id: str, rows: list[Computed]) -> None:
        if self.when_awake(partial(self.batch, line, opening, batch_id, rows)):
            return
        self.inbox.append(partial(self.admit, line.owner, opening, batch_id, rows))
        self.world.send(partial(line.queued, opening, batch_id))

    def cancel(self, owner: str, request_id: str, attempt: int) -> None:
        if not self.when_awake(partial(self.cancel, owner, request_id, attempt)):
            self.inbox.append(partial(self.drop, owner, {request_id: attempt}))

    # What the engine does with it before its next step.

    def serve(self, owner: str, opening: int) -> None:
        channel = self.channels.get(owner)
        if channel is not None and channel.opening == opening:
            self.drop(owner, {key: row.attempt for key, row in self.rows.items()})
            channel.ready = True
            self.report(owner, [])

    def admit(self, owner: str, opening: int, batch_id: str, rows: list[Computed]) -> None:
        channel = self.channels.get(owner)
        if channel is None or channel.opening != opening:
            return
        admission = worker_pb2.Admission(batch_id=batch_id)
        for row in rows:
            full = len(self.rows) >= SLOTS + WAITING
            if self.has_newer(row) or full or self.world.chance.random() < 0.05:
                admission.refused.add(request_id=row.task.request_id, retryable=True)
            else:
                self.rows[row.task.request_id] = row
        channel.admissions.append(admission)

    def has_newer(self, row: Computed) -> bool:
        held = self.rows.get(row.task.request_id)
        return held is not None and held.attempt >= row.attempt

    def drop(self, owner: str, attempts: dict[str, int]) -> None:
        for request_id, attempt in attempts.items():
            row = self.rows.get(request_id)
            if row is not None and row.owner == owner and row.attempt <= attempt:
                self.end(row, frame_pb2.ROW_END_CANCELLED)

    def end(self, row: Computed, end: frame_pb2.RowEnd.ValueType) -> None:
        del self.rows[row.task.request_id]
        self.endings.append((row.owner, ended(row, end)))

    # What it does.

    def step(self) -> None:
        self.world.at(STEP_S, self.step)
        if self.stalled or self.hangs:
            return
        inbox, self.inbox = self.inbox, []
        for act in inbox:
            act()
        self.steps += bool(self.rows)
        drawn = [] if self.world.now < self.fails_until else self.compute()
        if self.world.now < self.fails_until:
            for row in list(self.rows.values()):
                self.end(row, frame_pb2.ROW_END_RETURNED)
        frames: dict[str, list[frame_pb2.Frame]] = {name: [] for name in self.channels}
        for owner, frame in self.endings + drawn:
            if owner in frames:
                frames[owner].append(frame)
        self.endings.clear()
        for name, members in frames.items():
            if members or self.channels[name].admissions or self.world.chance.random() < 0.05:
                self.report(name, members)

    def compute(self) -> list[tuple[str, frame_pb2.Frame]]:
        running = self.running()
        self.prefill(running)
        return [(row.owner, self.draw(row)) for row in running if not row.to_prefill]

    def prefill(self, rows: list[Computed]) -> None:
        left = PREFILL_TOKENS
        for row in rows:
            tokens = min(left, row.to_prefill)
            row.to_prefill -= tokens
            left -= tokens

    def draw(self, row: Computed) -> frame_pb2.Frame:
        drawn = token(row.task.request_id, row.index)
        frame = frame_pb2.Frame(
            request_id=row.task.request_id, attempt=row.attempt, start_index=row.index
        )
        if row.index < row.task.sampling.max_tokens:
            frame.token_ids.append(drawn)
            row.index += 1
        if row.index >= row.task.sampling.max_tokens:
            frame.final.end = frame_pb2.ROW_END_LENGTH
            del self.rows[row.task.request_id]
        return frame

    def report(self, owner: str, frames: list[frame_pb2.Frame]) -> None:
        channel = self.channels[owner]
        report = worker_pb2.StepReport(
            worker=self.worker,
            sequence=channel.sequence,
            frames=frames,
            load=self.load(),
            admissions=channel.admissions,
            ready=channel.ready,
        )
        channel.sequence += 1
        channel.admissions = []
        if self.world.chance.random() > self.world.report_loss:
            self.on_channel(owner, partial(channel.line.report, channel.opening, report))

    def on_channel(self, owner: str, act: Callable[[], None]) -> None:
        self.world.in_order(f"{owner} {self.name}", act)

    # What befalls it.

    def kill(self) -> None:
        """The process dies; connections break, and a new one is there soon."""
        self.epoch += 1
        self.rows.clear()
        self.endings.clear()
        self.inbox.clear()
        self.stalled = self.hangs = False
        broken, self.channels = self.channels, {}
        for channel in broken.values():
            self.world.at(0.01, partial(channel.line.broken, channel.opening))

    def stall(self) -> None:
        """The process stands still."""
        self.stalled = True
        self.world.at(self.world.chance.random() * 8, self.wake)

    def hang(self) -> None:
        """A step takes far too long; the process ends the channels that the engine served, and opens others."""
        self.hangs = True
        self.world.at(1.0, self.end_channels)
        self.world.at(self.world.chance.random() * 8, self.wake)

    def end_channels(self) -> None:
        for owner, channel in list(self.channels.items()):
            if self.hangs and channel.ready:
                del self.channels[owner]
                owned = {key: row.attempt for key, row in self.rows.items()}
                self.inbox.append(partial(self.drop, owner, owned))
                self.on_channel(owner, partial(channel.line.broken, channel.opening))

    def fail(self) -> None:
        """Its steps raise for a while: it returns all rows at once, and looks idle."""
        self.fails_until = self.world.now + self.world.chance.random() * 1.5

    def wake(self) -> None:
        self.stalled = self.hangs = False

    def abandon(self, owner: str) -> None:
        """A batcher has gone."""
        self.channels.pop(owner, None)
        self.rows = {key: row for key, row in self.rows.items() if row.owner != owner}
