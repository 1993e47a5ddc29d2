"""A world around ledgers, driven by one seed: a work queue, gateways, a worker, and links that delay, lose and repeat.

Everything that happens is an event at a virtual time; the same seed gives the same history. `World.run` plays until
nothing is left to do, and the checks inside raise as soon as a rule of docs/wire.md is broken:

- the gateway accepts tokens only at the next index, and every token is the one that (request, index) gives;
- a request ends once, with all its tokens, or because it was cancelled or too late;
- a task leaves the work queue only when its gateway has its end or wants it no more;
- at the end no ledger holds a row, and the work queue is empty.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from batcher.core.channel import Channel, ChannelBroken
from batcher.core.effects import Effects, Settlement
from batcher.core.ledger import Ledger
from batcher.core.peers import Share
from batcher.core.rows import Row
from sluice.batching import Policy
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2, worker_pb2
from sluice.wire.subjects import CLASSES

SLOTS = 6
WORKER = "w"
ACK_WAIT_S = 10.0
STALL_S = 3.5
STEP_S = 0.05
TICK_S = 1.0
END_S = 600.0


def token(request_id: str, index: int) -> int:
    """What the model draws."""
    return (int(request_id[1:]) * 31 + index * 7) % 1000


@dataclass
class Message:
    """A task in the work queue."""

    task: task_pb2.Task
    deliveries: int = 0
    owner: "Shell | None" = None
    progress_at: float = 0.0


@dataclass
class Request:
    """A request at its gateway."""

    task: task_pb2.Task
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    end: int = 0
    cancelled: bool = False
    heard_at: float = 0.0

    @property
    def waiting(self) -> bool:
        return not self.end and not self.cancelled


@dataclass
class Computed:
    """A row in the worker."""

    task: task_pb2.Task
    owner: str
    attempt: int
    index: int


def computed(owner: str, row: Row) -> Computed:
    """What goes to the worker."""
    return Computed(row.task, owner, row.attempt, len(row.produced))


class Shell:
    """What `batcher.line` does around a ledger, in the world."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name, self.alive = world, name, True
        self.ledger = Ledger(name, policy=Policy(max_rows=4), final_retry_s=1.0)
        self.channel = Channel()
        self.live = False
        self.opening = 0
        self.heard_at = 0.0
        self.orphans: set[str] = set()
        world.at(0.0, self.open)
        world.at(TICK_S, self.tick)

    def tick(self) -> None:
        if not self.alive:
            return
        if self.live and self.world.now - self.heard_at > STALL_S:
            self.lose()
        self.pump()
        self.world.at(TICK_S, self.tick)

    def pump(self) -> None:
        if not self.alive:
            return
        replica = self.channel.replica(
            WORKER, self.ledger.sent(WORKER), Share(len(self.world.shells))
        )
        self.ledger.advance(self.world.now, [replica] if self.live else [])
        self.carry_out(self.ledger.take())

    def carry_out(self, effects: Effects) -> None:
        world = self.world
        for formed in effects.batches:
            rows = [computed(self.name, row) for row in formed.rows]
            world.send(partial(world.worker.batch, self, self.opening, formed.batch_id, rows))
        for _, frame in effects.frames:
            copy = frame_pb2.Frame.FromString(frame.SerializeToString())
            world.send_lossy(partial(world.take_frame, copy))
        if effects.cancels and self.live:
            rows_to_drop = [request_id for _, request_id in effects.cancels]
            world.send(partial(world.worker.cancel, self.name, rows_to_drop))
        for row in effects.questions:
            world.send(partial(world.answer_question, self, row))
        for request_id, how in effects.settled:
            world.settle(self, request_id, how)

    def open(self) -> None:
        """Opens a channel; rows of the one before are cancelled before it counts as live."""
        if not self.alive:
            return
        self.opening += 1
        self.channel, self.heard_at = Channel(), self.world.now
        orphans, self.orphans = set(self.orphans), set()
        self.orphans |= orphans
        self.world.send(partial(self.world.worker.open, self, self.opening, orphans))

    def opened(self, opening: int, orphans: set[str]) -> None:
        if opening == self.opening and self.alive:
            self.live = True
            self.orphans -= orphans
            self.pump()

    def lose(self) -> None:
        if not self.alive:
            return
        self.live = False
        self.orphans |= set(self.ledger.lost(WORKER, self.world.now))
        self.opening += 1
        self.world.at(0.3, self.open)
        self.pump()

    def report(self, opening: int, report: worker_pb2.StepReport) -> None:
        if opening != self.opening or not self.alive:
            return
        self.heard_at = self.world.now
        try:
            self.channel.step(report, self.world.now)
            whole = self.ledger.step(WORKER, report.frames, self.world.now)
        except ChannelBroken:
            whole = False
        if whole:
            self.pump()
        else:
            self.lose()

    def admission(self, opening: int, batch_id: str, admission: worker_pb2.Admission) -> None:
        if opening != self.opening or not self.alive:
            return
        self.channel.admitted(admission)
        self.ledger.admitted(WORKER, batch_id, admission, self.world.now)
        self.pump()


def cancelled(row: Computed) -> frame_pb2.Frame:
    """How a worker answers a cancel: late, and of the attempt that it had."""
    frame = frame_pb2.Frame(
        request_id=row.task.request_id, attempt=row.attempt, start_index=row.index
    )
    frame.final.end = frame_pb2.ROW_END_CANCELLED
    return frame


class Worker:
    """An engine without a model."""

    def __init__(self, world: "World") -> None:
        self.world, self.epoch, self.stalled = world, 0, False
        self.rows: dict[str, Computed] = {}
        self.endings: list[Computed] = []
        self.channels: dict[str, tuple[Shell, int, int]] = {}
        world.at(STEP_S, self.step)

    def load(self) -> worker_pb2.WorkerLoad:
        running = min(SLOTS, len(self.rows))
        return worker_pb2.WorkerLoad(slots=SLOTS, running=running, waiting=len(self.rows) - running)

    def when_awake(self, act: Callable[[], None]) -> bool:
        """A stalled worker finds its messages when it wakes."""
        if self.stalled:
            self.world.at(0.5, act)
        return self.stalled

    def open(self, shell: Shell, opening: int, orphans: set[str]) -> None:
        if self.when_awake(partial(self.open, shell, opening, orphans)):
            return
        self.channels[shell.name] = (shell, opening, 0)
        self.cancel(shell.name, sorted(orphans))
        self.report(shell.name, [])
        self.world.send(partial(shell.opened, opening, orphans))

    def batch(self, shell: Shell, opening: int, batch_id: str, rows: list[Computed]) -> None:
        if self.when_awake(partial(self.batch, shell, opening, batch_id, rows)):
            return
        admission = worker_pb2.Admission()
        for row in rows:
            lot = self.world.chance.random()
            if self.has_newer(row) or len(self.rows) >= SLOTS + 2 or lot < 0.05:
                admission.refused.add(request_id=row.task.request_id, retryable=True)
            elif lot < 0.98:  # The rest is not mentioned.
                admission.accepted.append(row.task.request_id)
                self.rows[row.task.request_id] = row
        admission.load.CopyFrom(self.load())
        self.world.send(partial(shell.admission, opening, batch_id, admission))

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

    def step(self) -> None:
        self.world.at(STEP_S, self.step)
        if self.stalled:
            return
        frames: dict[str, list[frame_pb2.Frame]] = {name: [] for name in self.channels}
        drawn = [(row.owner, self.draw(row)) for row in list(self.rows.values())[:SLOTS]]
        ended = [(row.owner, cancelled(row)) for row in self.endings]
        self.endings.clear()
        for owner, frame in ended + drawn:
            if owner in frames:
                frames[owner].append(frame)
        for name, members in frames.items():
            if members or self.world.chance.random() < 0.05:
                self.report(name, members)

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

    def report(self, name: str, frames: list[frame_pb2.Frame]) -> None:
        shell, opening, sequence = self.channels[name]
        self.channels[name] = (shell, opening, sequence + 1)
        report = worker_pb2.StepReport(
            worker=f"w{self.epoch}", sequence=sequence, frames=frames, load=self.load()
        )
        if self.world.chance.random() > self.world.report_loss:
            self.world.in_order(name, partial(shell.report, opening, report))

    def kill(self) -> None:
        """The process dies; connections break, and a new one is there soon."""
        self.epoch += 1
        self.rows.clear()
        self.endings.clear()
        broken, self.channels = self.channels, {}
        for shell, opening, _ in broken.values():
            self.world.at(0.01, partial(self.break_channel, shell, opening))

    def break_channel(self, shell: Shell, opening: int) -> None:
        if shell.opening == opening:
            shell.lose()

    def abandon(self, name: str) -> None:
        """A batcher has gone."""
        self.channels.pop(name, None)
        self.rows = {key: row for key, row in self.rows.items() if row.owner != name}


class World:
    """Everything, and the clock."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = 0
        self.quiet_at = 60.0
        self.report_loss = self.chance.choice([0.0, 0.0, 0.002])
        self.frame_loss = self.chance.choice([0.0, 0.05, 0.2])
        self.ordered_at: dict[str, float] = {}
        self.queue: dict[str, Message] = {}
        self.requests: dict[str, Request] = {}
        self.worker = Worker(self)
        self.shells = [Shell(self, "b1"), Shell(self, "b2")]
        self.at(TICK_S, self.redeliver)
        for _ in range(self.chance.randrange(10, 60)):
            self.at(self.chance.random() * 30, self.publish)
        for _ in range(self.chance.randrange(4)):
            self.at(self.chance.random() * 40, self.worker.kill)
        for _ in range(self.chance.randrange(3)):
            self.at(self.chance.random() * 40, self.stall)
        if self.chance.random() < 0.5:
            self.at(self.chance.random() * 40, self.kill_batcher)

    # Time and links.

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        self.numbers += 1
        heappush(self.events, (self.now + delay_s, self.numbers, act))

    def send(self, act: Callable[[], None]) -> None:
        """A link that delays; messages may overtake each other."""
        self.at(self.chance.random() * 0.1, act)

    def send_lossy(self, act: Callable[[], None]) -> None:
        """Core NATS: loses, and a gateway may see a message again."""
        if self.now > self.quiet_at or self.chance.random() > self.frame_loss:
            self.send(act)
        if self.chance.random() < 0.02:
            self.send(act)

    def in_order(self, name: str, act: Callable[[], None]) -> None:
        """One stream: what was sent first arrives first."""
        at = max(self.now + self.chance.random() * 0.1, self.ordered_at.get(name, 0.0))
        self.ordered_at[name] = at
        self.at(at - self.now, act)

    def run(self) -> None:
        """Plays until every request has ended and nothing is held."""
        while not self.over():
            self.now, _, act = heappop(self.events)
            assert self.now < END_S, self.left()
            act()
        for request in self.requests.values():
            self.check_end(request)

    def over(self) -> bool:
        held = any(len(shell.ledger) for shell in self.shells if shell.alive)
        return self.now > self.quiet_at and not held and not self.queue

    def left(self) -> str:
        waiting = [key for key, request in self.requests.items() if request.waiting]
        return f"never ended: {waiting}, in the work queue: {sorted(self.queue)}"

    # Faults.

    def stall(self) -> None:
        self.worker.stalled = True
        self.at(self.chance.random() * 8, self.wake)

    def wake(self) -> None:
        self.worker.stalled = False

    def kill_batcher(self) -> None:
        victim = self.chance.choice(self.shells)
        victim.alive = False
        self.at(0.05, partial(self.worker.abandon, victim.name))
        name = f"{victim.name}x"
        self.shells = [Shell(self, name) if s is victim else s for s in self.shells]

    # The work queue.

    def publish(self) -> None:
        request_id = f"r{len(self.requests) + 1}"
        task = task_pb2.Task(
            request_id=request_id, gateway="g", priority_class=self.chance.choice(CLASSES)
        )
        task.prompt_token_ids.extend(range(1, 4))
        task.sampling.max_tokens = self.chance.randrange(1, 60)
        late = self.chance.random() < 0.1
        task.deadline_unix_ms = int((self.now + self.chance.random() * 3) * 1e3) if late else 0
        self.requests[request_id] = Request(task, heard_at=self.now)
        self.queue[request_id] = Message(task)
        self.deliver(self.queue[request_id])
        if self.chance.random() < 0.1:
            self.at(self.chance.random() * 4, partial(self.cancel, request_id))
        self.at(STALL_S, partial(self.ask_again, request_id))

    def deliver(self, message: Message) -> None:
        message.deliveries += 1
        shell = self.chance.choice(self.shells)
        message.owner, message.progress_at = shell, self.now
        self.send(partial(self.arrive, shell, message, message.deliveries))

    def arrive(self, shell: Shell, message: Message, deliveries: int) -> None:
        request = self.requests[message.task.request_id]
        if not shell.alive or message.task.request_id in shell.ledger:
            return
        if deliveries > 1 and not request.waiting:
            shell.ledger.drop(message.task.request_id)
        else:
            due = message.task.deadline_unix_ms / 1e3 or float("inf")
            held = request.tokens if deliveries > 1 else []
            row = Row(
                message.task, deliveries=deliveries, produced=held, deadline=due, now=self.now
            )
            shell.ledger.add(row, self.now)
        shell.pump()

    def redeliver(self) -> None:
        self.at(TICK_S, self.redeliver)
        for message in list(self.queue.values()):
            owner = message.owner
            if owner is not None and owner.alive and message.task.request_id in owner.ledger:
                message.progress_at = self.now
            elif self.now - message.progress_at > ACK_WAIT_S:
                self.deliver(message)

    def settle(self, shell: Shell, request_id: str, how: Settlement) -> None:
        if how is Settlement.ACK:
            assert not self.requests[request_id].waiting, f"{request_id} acknowledged too early"
            self.queue.pop(request_id, None)
        elif how is Settlement.NAK and request_id in self.queue:
            self.deliver(self.queue[request_id])

    # The gateway.

    def take_frame(self, frame: frame_pb2.Frame) -> None:
        request = self.requests[frame.request_id]
        if frame.attempt < request.attempt or not request.waiting:
            if request.end and frame.HasField("final"):
                self.confirm(frame.request_id)
            return
        request.attempt, request.heard_at = frame.attempt, self.now
        known = len(request.tokens) - frame.start_index
        if known < 0:
            self.ask_for(frame.request_id)
            return
        request.tokens.extend(frame.token_ids[known:])
        expected = [token(frame.request_id, index) for index in range(len(request.tokens))]
        assert request.tokens == expected, frame.request_id
        if frame.HasField("final"):
            request.end = frame.final.end
            self.confirm(frame.request_id)

    def confirm(self, request_id: str) -> None:
        self.to_batchers(lambda shell: shell.ledger.confirm([request_id], self.now))

    def ask_for(self, request_id: str) -> None:
        index = len(self.requests[request_id].tokens)
        self.to_batchers(lambda shell: shell.ledger.resend(request_id, index))

    def ask_again(self, request_id: str) -> None:
        request = self.requests[request_id]
        if request.waiting:
            if self.now - request.heard_at > STALL_S:
                self.ask_for(request_id)
            self.at(STALL_S, partial(self.ask_again, request_id))

    def cancel(self, request_id: str) -> None:
        if self.requests[request_id].waiting:
            self.requests[request_id].cancelled = True
            self.to_batchers(lambda shell: shell.ledger.cancel([request_id], self.now))

    def to_batchers(self, act: Callable[[Shell], None]) -> None:
        for shell in self.shells:
            self.send_lossy(partial(self.control, shell, act))

    def control(self, shell: Shell, act: Callable[[Shell], None]) -> None:
        if shell.alive:
            act(shell)
            shell.pump()

    def answer_question(self, shell: Shell, row: Row) -> None:
        request = self.requests[row.id]
        answer = control_pb2.HeldTokensResponse(
            waiting=request.waiting, token_ids=request.tokens, attempt=request.attempt
        )
        lost = self.now < self.quiet_at and self.chance.random() < 0.2
        shell.ledger.held(row.id, None if lost else answer, self.now)
        shell.pump()

    def check_end(self, request: Request) -> None:
        whole = len(request.tokens) == request.task.sampling.max_tokens
        assert not request.waiting, request.task.request_id
        if not request.cancelled and not request.task.deadline_unix_ms:
            assert request.end == frame_pb2.ROW_END_LENGTH
        assert whole or request.end != frame_pb2.ROW_END_LENGTH
