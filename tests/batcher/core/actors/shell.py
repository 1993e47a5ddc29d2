"""What `batcher.line` and `batcher.workers` do around a ledger, in the world."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from batcher.core.channel import Channel, ChannelBroken
from batcher.core.effects import Effects
from batcher.core.ledger import Ledger
from batcher.core.peers import Share
from batcher.core.scheduler.capacity import Capacity
from sluice.internal.v1 import frame_pb2, worker_pb2
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
        self.ledger = Ledger(name, policy=world.policy, final_retry_s=1.0)
        self.checks = Checks(world.policy)
        self.lines = {engine.name: Line(self, engine) for engine in world.engines}
        world.at(TICK_S, self.tick)

    def tick(self) -> None:
        if not self.alive:
            return
        for line in self.lines.values():
            line.watch()
        self.pump()
        self.world.at(TICK_S, self.tick)

    def pump(self) -> None:
        if not self.alive:
            return
        now = self.world.now
        capacities = [line.capacity() for line in self.lines.values() if line.live]
        self.ledger.advance(now, capacities)
        effects = self.ledger.take()
        self.checks.see(effects, capacities, now)
        self.carry_out(effects)

    def change_policy(self, policy: Policy) -> None:
        if self.alive:
            self.ledger.change_policy(policy, {})
            self.checks.change_policy(policy)
            self.pump()

    def carry_out(self, effects: Effects) -> None:
        world = self.world
        for formed in effects.batches:
            line = self.lines[formed.batch.worker]
            rows = [computed(self.name, row) for row in formed.rows]
            world.send(partial(line.engine.batch, line, line.opening, formed.batch_id, rows))
        for _, frame in effects.frames:
            copy = frame_pb2.Frame.FromString(frame.SerializeToString())
            world.send_lossy(partial(world.take_frame, copy))
        for worker, request_id in effects.cancels:
            if self.lines[worker].live:
                world.send(partial(self.lines[worker].engine.cancel, self.name, [request_id]))
        for row in effects.questions:
            world.send(partial(world.answer_question, self, row))
        for request_id, how in effects.settled:
            world.settle(self, request_id, how)


class Line:
    """The channel of one batcher to one worker, through all its openings."""

    def __init__(self, shell: Shell, engine: Engine) -> None:
        self.shell, self.engine, self.world = shell, engine, shell.world
        self.channel = Channel()
        self.live = False
        self.opening = 0
        self.heard_at = 0.0
        self.orphans: set[str] = set()
        self.world.at(0.0, self.open)

    @property
    def owner(self) -> str:
        return self.shell.name

    def capacity(self) -> Capacity:
        sent = self.shell.ledger.sent(self.engine.name)
        return self.channel.capacity(self.engine.name, sent, Share(len(self.world.shells)))

    def is_stale(self, opening: int) -> bool:
        """Whether something comes from a channel that was given up."""
        return opening != self.opening or not self.shell.alive

    def watch(self) -> None:
        if self.live and self.world.now - self.heard_at > STALL_S:
            self.lose()

    def open(self) -> None:
        """Opens a channel; rows of the one before are cancelled before it counts as live."""
        if not self.shell.alive:
            return
        self.opening += 1
        self.channel, self.heard_at = Channel(), self.world.now
        self.world.send(partial(self.engine.open, self, self.opening, set(self.orphans)))

    def opened(self, opening: int, orphans: set[str], worker: str) -> None:
        if self.is_stale(opening):
            return
        self.live = True
        self.orphans -= orphans
        self.shell.ledger.live(self.engine.name, worker)
        self.shell.pump()

    def broken(self, opening: int) -> None:
        if not self.is_stale(opening):
            self.lose()

    def lose(self) -> None:
        self.live = False
        self.orphans |= set(self.shell.ledger.lost(self.engine.name, self.world.now))
        self.opening += 1
        self.world.at(0.3, self.open)
        self.shell.pump()

    def report(self, opening: int, report: worker_pb2.StepReport) -> None:
        if self.is_stale(opening):
            return
        self.heard_at = self.world.now
        try:
            self.channel.step(report, self.world.now)
            whole = self.shell.ledger.step(self.engine.name, report.frames, self.world.now)
        except ChannelBroken:
            whole = False
        if whole:
            self.shell.pump()
        else:
            self.lose()

    def admission(self, opening: int, batch_id: str, admission: worker_pb2.Admission) -> None:
        if self.is_stale(opening):
            return
        self.channel.admitted(admission)
        self.shell.ledger.admitted(self.engine.name, batch_id, admission, self.world.now)
        self.shell.pump()
