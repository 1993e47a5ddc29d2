"""A worker without a model: it prefills, draws a token a row and step, stalls and dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def cancelled(row: Computed) -> frame_pb2.Frame:
    """How a worker answers a cancel: late, and of the attempt that it had."""
    frame = frame_pb2.Frame(
        request_id=row.task.request_id, attempt=row.attempt, start_index=row.index
    )
    frame.final.end = frame_pb2.ROW_END_CANCELLED
    return frame


class Engine:
    """One worker of the model; its process has a number, and every batcher a channel to it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.epoch, self.steps, self.stalled = 0, 0, False
        self.rows: dict[str, Computed] = {}
        self.endings: list[Computed] = []
        self.channels: dict[str, tuple[Line, int, int]] = {}
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

    def open(self, line: Line, opening: int, orphans: set[str]) -> None:
        if self.when_awake(partial(self.open, line, opening, orphans)):
            return
        self.channels[line.owner] = (line, opening, 0)
        self.cancel(line.owner, sorted(orphans))
        self.report(line.owner, [])
        self.world.send(partial(line.opened, opening, orphans, self.worker))

    def batch(self, line: Line, opening: int, batch_id: str, rows: list[Computed]) -> None:
        if self.when_awake(partial(self.batch, line, opening, batch_id, rows)):
            return
        admission = worker_pb2.Admission()
        for row in rows:
            lot = self.world.chance.random()
            if self.has_newer(row) or len(self.rows) >= SLOTS + WAITING or lot < 0.05:
                admission.refused.add(request_id=row.task.request_id, retryable=True)
            elif lot < 0.98:  # The rest is not mentioned.
                admission.accepted.append(row.task.request_id)
                self.rows[row.task.request_id] = row
        admission.load.CopyFrom(self.load())
        self.world.send(partial(line.admission, opening, batch_id, admission))

    def has_newer(self, row: Computed) -> bool:
        held = self.rows.get(row.task.request_id)
        return held is not None and held.attempt >= row.attempt

    def cancel(self, owner: str, request_ids: list[str]) -> None:
        if self.when_awake(partial(self.cancel, owner, request_ids)):
            return
        for request_id in request_ids:
            row = self.rows.get(request_id)
            if row is not None and row.owner == owner:
                del self.rows[request_id]
                self.endings.append(row)

    # What it does.

    def step(self) -> None:
        self.world.at(STEP_S, self.step)
        if self.stalled:
            return
        self.steps += bool(self.rows)
        frames: dict[str, list[frame_pb2.Frame]] = {name: [] for name in self.channels}
        running = self.running()
        self.prefill(running)
        drawn = [(row.owner, self.draw(row)) for row in running if not row.to_prefill]
        ended = [(row.owner, cancelled(row)) for row in self.endings]
        self.endings.clear()
        for owner, frame in ended + drawn:
            if owner in frames:
                frames[owner].append(frame)
        for name, members in frames.items():
            if members or self.world.chance.random() < 0.05:
                self.report(name, members)

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
        line, opening, sequence = self.channels[owner]
        self.channels[owner] = (line, opening, sequence + 1)
        report = worker_pb2.StepReport(
            worker=self.worker, sequence=sequence, frames=frames, load=self.load()
        )
        if self.world.chance.random() > self.world.report_loss:
            self.world.in_order(f"{owner} {self.name}", partial(line.report, opening, report))

    # What befalls it.

    def kill(self) -> None:
        """The process dies; connections break, and a new one is there soon."""
        self.epoch += 1
        self.rows.clear()
        self.endings.clear()
        broken, self.channels = self.channels, {}
        for line, opening, _ in broken.values():
            self.world.at(0.01, partial(line.broken, opening))

    def stall(self) -> None:
        self.stalled = True
        self.world.at(self.world.chance.random() * 8, self.wake)

    def wake(self) -> None:
        self.stalled = False

    def abandon(self, owner: str) -> None:
        """A batcher has gone."""
        self.channels.pop(owner, None)
        self.rows = {key: row for key, row in self.rows.items() if row.owner != owner}
