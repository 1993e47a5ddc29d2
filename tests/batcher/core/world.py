"""Request tables and a gateway in a simulated mesh, driven by one seed: batchers, workers, JetStream, lossy links.

Everything that happens is an event at a virtual time; the same seed gives the same history. Workers stall and die,
batchers drain and die, the gateway is cut off, the network becomes slow, clocks jump, tasks are delivered twice,
callers cancel, and the policy changes. `World.run` plays until nothing is left to do, and the checks inside raise as
soon as a rule is broken:

- the gateway accepts tokens only at the next index, and every token is the one that (request, index) gives;
- a request ends once, with all its tokens, or because it was cancelled or too late;
- no batch is beyond its budgets, and no class is passed over for longer than its policy says, see `Checks`;
- at the end no batcher computes a row, and JetStream has no task.
"""

import random
from collections.abc import Callable, Collection
from functools import partial
from heapq import heappop, heappush
from typing import Final

from gateway.streaming.assembler import Assembler
from gateway.streaming.dispatch import Dispatch, SentRow
from gateway.streaming.row import Row
from gateway.streaming.transcript import Transcript
from sluice.errors import SluiceError
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.settings.batching import PRESETS, Policy
from sluice.wire.subjects import CLASSES
from tests.batcher.core.actors.engine import Engine
from tests.batcher.core.actors.requests import LATE, Message, Request, token
from tests.batcher.core.actors.shell import Shell

ACK_WAIT_S: Final = 10.0
END_S: Final = 900.0
STALL_S: Final = 0.75
GATEWAY_TICK_S: Final = 0.1
EXPIRY_S: Final = 3.5


class Letters:
    """A detokenizer for tokens that are no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class World:
    """Everything, and the clock."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = 0
        self.quiet_at = 60.0
        self.slow_until = 0.0
        self.report_loss = self.chance.choice([0.0, 0.0, 0.002])
        self.frame_loss = self.chance.choice([0.0, 0.05, 0.2])
        self.ordered_at: dict[str, float] = {}
        self.cut_until = 0.0
        self.queue: dict[str, Message] = {}
        self.sequences = self.delivered = 0
        self.reported: dict[str, float] = {}
        self.requests: dict[str, Request] = {}
        self.dispatch = Dispatch("g", self, STALL_S)
        self.dispatch.on_failed = self.fail
        self.policy = self.drawn_policy()
        self.engines = [Engine(self, f"w{n}") for n in range(self.chance.randrange(1, 4))]
        self.shells = [Shell(self, "b1"), Shell(self, "b2")]
        self.at(0.0, self.tick)
        self.plan(self.publish, self.chance.randrange(10, 60), within_s=30)
        for fault, most in (
            (self.kill_engine, 4),
            (self.stall_engine, 4),
            (self.hang_engine, 3),
            (self.fail_engine, 3),
            (self.slow_down, 3),
            (self.jump, 2),
            (self.deliver_again, 4),
            (self.kill_batcher, 3),
            (self.drain_batcher, 2),
            (self.cut_off, 2),
            (self.change_policy, 2),
        ):
            self.plan(fault, self.chance.randrange(most), within_s=40)

    def plan(self, act: Callable[[], None], times: int, within_s: float) -> None:
        for _ in range(times):
            self.at(self.chance.random() * within_s, act)

    def drawn_policy(self) -> Policy:
        return Policy.model_validate(
            {
                "name": self.chance.choice([*PRESETS, "continuous", "continuous"]),
                "max_rows": self.chance.choice([2, 4, 16]),
                "waiting_tokens_max": self.chance.choice([100.0, 4096.0]),
                "classes": {"standard": {"aging_s": 0.5}, "bulk": {"aging_s": 2.0}},
            }
        )

    # Time and links.

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        self.numbers += 1
        heappush(self.events, (self.now + delay_s, self.numbers, act))

    def delay_s(self) -> float:
        return self.chance.random() * (2.0 if self.now < self.slow_until else 0.1)

    def send(self, act: Callable[[], None]) -> None:
        """A link that delays; messages may overtake each other."""
        self.at(self.delay_s(), act)

    def send_lossy(self, way: str, act: Callable[[], None]) -> None:
        """Core NATS: keeps the order between two processes, loses, and something may be said again later."""
        if self.now > self.quiet_at or self.chance.random() > self.frame_loss:
            self.in_order(way, act)
        if self.chance.random() < 0.02:
            self.in_order(way, act)

    def in_order(self, name: str, act: Callable[[], None]) -> None:
        """One stream: what was sent first arrives first."""
        at = max(self.now + self.delay_s(), self.ordered_at.get(name, 0.0))
        self.ordered_at[name] = at
        self.at(at - self.now, act)

    def run(self) -> None:
        """Plays until every request has ended and nothing is held."""
        while not self.over():
            at, _, act = heappop(self.events)
            self.now = max(self.now, at)
            assert self.now < END_S, self.left()
            act()
        for request in self.requests.values():
            self.check_end(request)

    def over(self) -> bool:
        held = any(shell.requests.active for shell in self.shells if shell.alive)
        held = held or any(request.waiting for request in self.requests.values())
        return self.now > self.quiet_at and not held and not self.queue

    def left(self) -> str:
        waiting = [key for key, request in self.requests.items() if request.waiting]
        return f"never ended: {waiting}, in JetStream: {sorted(self.queue)}"

    # Faults.

    def kill_engine(self) -> None:
        self.chance.choice(self.engines).kill()

    def stall_engine(self) -> None:
        self.chance.choice(self.engines).stall()

    def hang_engine(self) -> None:
        self.chance.choice(self.engines).hang()

    def fail_engine(self) -> None:
        self.chance.choice(self.engines).fail()

    def slow_down(self) -> None:
        self.slow_until = self.now + self.chance.random() * 5

    def jump(self) -> None:
        """The machine slept."""
        self.now += self.chance.random() * 8

    def deliver_again(self) -> None:
        """JetStream heard nothing of a task, though a batcher has taken it."""
        taken = [row for row in self.dispatch._rows.values() if row.sequence]
        if taken:
            row = self.chance.choice(taken)
            self.queue[row.row_id] = Message(self.copy(row.task), row.sequence, self.now)

    def kill_batcher(self) -> None:
        self.end_batcher(self.chance.choice(self.shells))

    def end_batcher(self, victim: Shell) -> None:
        if not victim.alive:
            return
        victim.alive = False
        for engine in self.engines:
            self.at(0.05, partial(engine.abandon, victim.name))
        name = f"{victim.name}x"
        self.shells = [Shell(self, name) if s is victim else s for s in self.shells]

    def drain_batcher(self) -> None:
        victim = self.chance.choice(self.shells)
        self.reported.pop(victim.name, None)
        victim.drain()
        self.at(self.chance.random() * 3, victim.release)
        self.at(4.0, partial(self.end_batcher, victim))

    def cut_off(self) -> None:
        """NATS does not answer the gateway."""
        self.cut_until = self.now + self.chance.random() * 10

    def change_policy(self) -> None:
        self.policy = self.drawn_policy()
        for shell in self.shells:
            shell.change_policy(self.policy)

    # The gateway.

    def publish(self) -> None:
        chance = self.chance
        request_id = f"r{len(self.requests) + 1}"
        task = task_pb2.Task(
            request_id=request_id, gateway="g", priority_class=chance.choice(CLASSES)
        )
        task.tenant = chance.choice(["a", "b"])
        task.prompt_token_ids.extend(range(1, 2 + min(200, int(chance.lognormvariate(3.5, 1)))))
        task.sampling.max_tokens = chance.randrange(1, 60)
        late = chance.random() < 0.1
        deadline = self.now + (chance.random() * 3 if late else END_S)
        transcript = Transcript(Letters(), (), frozenset(), str)
        attempt = Row(request_id, "m", 1, transcript, Assembler(0, STALL_S, 0.0))
        row = SentRow(task, {}, attempt, deadline)
        self.requests[request_id] = Request(row, late)
        self.dispatch.send(row, self.now)
        self.flush()
        if chance.random() < 0.1:
            self.at(chance.random() * 4, partial(self.leave, request_id, 0))
        if late:
            self.at(deadline - self.now, partial(self.leave, request_id, LATE))

    def leave(self, request_id: str, end: int) -> None:
        """The caller goes, or its deadline passes."""
        request = self.requests[request_id]
        if request.waiting:
            request.cancelled, request.end = True, end
            self.dispatch.cancel(request_id)
            self.flush()

    def fail(self, row_id: str, error: SluiceError, now: float) -> None:
        raise AssertionError(f"{row_id} failed: {error}")

    def choose(self, model: str, without: Collection[str], now: float) -> str | None:
        """`gateway.streaming.dispatch.Batchers`: any that has reported lately, dead ones included."""
        found = [
            name
            for name, at in self.reported.items()
            if at + EXPIRY_S > now and name not in without
        ]
        return self.chance.choice(found) if found else None

    def report(self, batcher: str) -> None:
        if self.connected:
            self.reported[batcher] = self.now
            self.dispatch.heard(batcher, self.now)

    @property
    def connected(self) -> bool:
        return self.now >= self.cut_until

    def tick(self) -> None:
        self.at(GATEWAY_TICK_S, self.tick)
        if self.connected:
            self.dispatch.tick(self.now)
        else:
            self.dispatch.restart(self.now)
        self.flush()
        for message in list(self.queue.values()):
            if message.deliver_at <= self.now:
                self.deliver(message)

    def flush(self) -> None:
        """What `gateway.upstream.nats_transport` does."""
        outgoing = self.dispatch.drain()
        for batcher, row in outgoing.tasks:
            payload = row.task.SerializeToString()
            self.to_batcher(batcher, partial(Shell.take, payload=payload))
        for batcher, message in outgoing.control:
            told = partial(
                Shell.control, payload=message.SerializeToString(), broadcast=not batcher
            )
            for name in [batcher] if batcher else [shell.name for shell in self.shells]:
                self.to_batcher(name, told)
        for row in outgoing.stored:
            self.sequences += 1
            self.queue[row.row_id] = Message(self.copy(row.task), self.sequences, self.now)
            self.send(partial(self.stored, row.row_id, self.sequences))
        for queue in outgoing.lookups:
            self.send(partial(self.tell_delivered, queue, self.delivered))
        assert not outgoing.dead

    def stored(self, row_id: str, sequence: int) -> None:
        self.dispatch.stored(row_id, sequence, self.now)

    def tell_delivered(self, queue: tuple[str, str], sequence: int) -> None:
        self.dispatch.taken_up_to(queue, sequence, self.now)
        self.flush()

    def to_batcher(self, name: str, act: Callable[[Shell], None]) -> None:
        """Core NATS: it says when nobody has subscribed."""
        shell = next((shell for shell in self.shells if shell.name == name), None)
        if not self.connected:
            return
        if shell is None or not shell.alive:
            self.send(partial(self.tell_gone, name))
        else:
            self.send_lossy(f"g {name}", partial(self.arrive, shell, act))

    def arrive(self, shell: Shell, act: Callable[[Shell], None]) -> None:
        if shell.alive:
            act(shell)

    def tell_gone(self, batcher: str) -> None:
        if self.connected:
            self.dispatch.gone(batcher, self.now)
            self.flush()

    def to_gateway(self, batcher: str, payload: bytes) -> None:
        self.send_lossy(f"{batcher} g", partial(self.take, payload))

    def take(self, payload: bytes) -> None:
        """What `gateway.streaming.registry` does."""
        if not self.connected:
            return
        bundle, dispatch = frame_pb2.FrameBundle.FromString(payload), self.dispatch
        dispatch.heard(bundle.batcher, self.now)
        for ref in bundle.held:
            dispatch.accepts(bundle.batcher, ref.request_id, ref.attempt, self.now, waits=True)
        dispatch.unknown(bundle.batcher, bundle.unknown, self.now)
        for frame in bundle.frames:
            if frame.final.end == frame_pb2.ROW_END_RETURNED:
                dispatch.returned(bundle.batcher, frame, self.now)
            elif dispatch.accepts(bundle.batcher, frame.request_id, frame.attempt, self.now):
                self.take_frame(frame)
        self.flush()

    def take_frame(self, frame: frame_pb2.Frame) -> None:
        request = self.requests[frame.request_id]
        accepted = request.row.attempt.accept(frame, self.now)
        tokens = request.tokens
        assert tokens == [token(frame.request_id, index) for index in range(len(tokens))]
        if accepted.final is not None:
            request.end = accepted.final.end
            self.dispatch.release(frame.request_id, accepted.final)
        elif accepted.gap:
            self.dispatch.ask(frame.request_id)

    # JetStream.

    def deliver(self, message: Message) -> None:
        self.delivered = max(self.delivered, message.sequence)
        message.deliver_at = self.now + ACK_WAIT_S
        shell = self.chance.choice(self.shells)
        self.send(partial(self.pull, shell, message))

    def pull(self, shell: Shell, message: Message) -> None:
        if shell.alive and self.queue.pop(message.task.request_id, None) is not None:
            shell.take(message.task.SerializeToString())

    @staticmethod
    def copy(task: task_pb2.Task) -> task_pb2.Task:
        return task_pb2.Task.FromString(task.SerializeToString())

    def check_end(self, request: Request) -> None:
        whole = len(request.tokens) == request.row.task.sampling.max_tokens
        assert not request.waiting, request.row.row_id
        if not request.cancelled and not request.has_deadline:
            assert request.end == frame_pb2.ROW_END_LENGTH
        assert whole or request.end != frame_pb2.ROW_END_LENGTH
