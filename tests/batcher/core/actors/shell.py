"""What `batcher.model_loop` and `batcher.workers` do around a request table, in the world."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from batcher.core.effects import Effects
from batcher.core.requests import Requests
from batcher.core.row import Row
from batcher.core.workers import ChannelBroken, WorkerShare
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2, worker_pb2
from sluice.settings.batching import Policy
from tests.batcher.core.actors.checks import Checks
from tests.batcher.core.actors.engine import Engine, computed

if TYPE_CHECKING:
    from tests.batcher.core.world import World

STALL_S: Final = 3.5
TICK_S: Final = 1.0


class Shell:
    """One batcher."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.alive = world, name, True
        self.requests = Requests(name, policy=world.policy)
        self.checks = Checks(world.policy)
        self.lines = {engine.name: Line(self, engine) for engine in world.engines}
        world.at(TICK_S, self.tick)

    def tick(self) -> None:
        if not self.alive:
            return
        for line in self.lines.values():
            line.watch()
        self.pump()
        self.world.send(partial(self.world.report, self.name))
        self.world.at(TICK_S, self.tick)

    def pump(self) -> None:
        if not self.alive:
            return
        now = self.world.now
        capacities = self.requests.capacities(WorkerShare(len(self.world.shells)), now)
        self.requests.advance(now, capacities)
        effects = self.requests.take()
        self.checks.see(effects, capacities, now)
        self.carry_out(effects)

    def change_policy(self, policy: Policy) -> None:
        if self.alive:
            self.requests.change_policy(policy, {})
            self.checks.change_policy(policy)
            self.pump()

    def carry_out(self, effects: Effects) -> None:
        world = self.world
        for formed in effects.batches:
            line = self.lines[formed.batch.worker]
            rows = [computed(self.name, row) for row in formed.rows]
            world.send(partial(line.engine.batch, line, line.opening, formed.batch_id, rows))
        if effects.frames or effects.held:
            bundle = frame_pb2.FrameBundle(
                batcher=self.name,
                frames=[frame for _, frame in effects.frames],
                held=[ref for _, ref in effects.held],
            )
            world.to_gateway(self.name, bundle.SerializeToString())
        for row in effects.cancels:
            line = self.lines[row.worker]
            if line.live:
                world.send(partial(line.engine.cancel, self.name, row.request_id, row.attempt))

    def take(self, payload: bytes) -> None:
        """A task has come."""
        self.requests.add(Row(task_pb2.Task.FromString(payload), self.world.now), self.world.now)
        self.pump()

    def control(self, payload: bytes, *, broadcast: bool) -> None:
        """A gateway cancels rows, or asks about them."""
        message = control_pb2.ControlMessage.FromString(payload)
        self.requests.cancel(message.cancel.rows, self.world.now)
        asked = [row for row in message.query.rows if not self.requests.answer(row)]
        unknown = [frame_pb2.RowRef(request_id=r.request_id, attempt=r.attempt) for r in asked]
        if unknown and not broadcast:
            bundle = frame_pb2.FrameBundle(batcher=self.name, unknown=unknown)
            self.world.to_gateway(self.name, bundle.SerializeToString())
        self.pump()

    def drain(self) -> None:
        """It is asked to end: it returns what waits, and soon the rest."""
        self.requests.drain(self.world.now)
        self.pump()

    def release(self) -> None:
        """Its time is over: it returns what it computes."""
        if self.alive:
            self.requests.release(self.world.now)
            self.pump()


class Line:
    """The channel of one batcher to one worker, through all its openings."""

    def __init__(self, shell: Shell, engine: Engine) -> None:
        self.shell, self.engine, self.world = shell, engine, shell.world
        self.live = False
        self.opening = 0
        self.heard_at = 0.0
        self.world.at(0.0, self.open)

    @property
    def owner(self) -> str:
        return self.shell.name

    def is_stale(self, opening: int) -> bool:
        """Whether something comes from a channel that was given up."""
        return opening != self.opening or not self.shell.alive

    def watch(self) -> None:
        if self.opening and self.world.now - self.heard_at > STALL_S:
            self.lose()

    def open(self) -> None:
        """Opens a channel; the rows of the one before end with that."""
        if not self.shell.alive:
            return
        self.opening += 1
        self.heard_at = self.world.now
        self.world.send(partial(self.engine.open, self, self.opening))

    def broken(self, opening: int) -> None:
        if not self.is_stale(opening):
            self.lose()

    def lose(self) -> None:
        self.live = False
        self.shell.requests.lost(self.engine.name, self.world.now)
        self.opening += 1
        self.heard_at = self.world.now
        self.world.at(0.3, self.open)
        self.shell.pump()

    def report(self, opening: int, report: worker_pb2.StepReport) -> None:
        if self.is_stale(opening):
            return
        self.heard_at, self.live = self.world.now, report.ready
        try:
            self.shell.requests.step(self.engine.name, report, self.world.now)
        except ChannelBroken:
            self.lose()
        else:
            self.shell.pump()

    def queued(self, opening: int, batch_id: str) -> None:
        if self.is_stale(opening):
            return
        self.shell.requests.queued(self.engine.name, batch_id, self.world.now)
        self.shell.pump()
