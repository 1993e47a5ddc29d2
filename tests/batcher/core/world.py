"""Request tables in a simulated mesh, driven by one seed: a work queue, gateways, workers, lossy links.

Everything that happens is an event at a virtual time; the same seed gives the same history. Workers stall and die,
batchers die, the network becomes slow, clocks jump, tasks are delivered twice, callers cancel, and the policy changes.
`World.run` plays until nothing is left to do, and the checks inside raise as soon as a rule is broken:

- the gateway accepts tokens only at the next index, and every token is the one that (request, index) gives;
- a request ends once, with all its tokens, or because it was cancelled or too late;
- a task leaves the work queue only when its gateway has its end or wants it no more;
- no batch is beyond its budgets, and no class is passed over for longer than its policy says, see `Checks`;
- at the end no requests holds a row, and the work queue is empty.
"""

import random
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Final

from batcher.core.effects import Settlement
from batcher.core.row import Row
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2
from sluice.settings.batching import PRESETS, Policy
from sluice.wire.subjects import CLASSES
from tests.batcher.core.actors.engine import Engine
from tests.batcher.core.actors.requests import Message, Request, token
from tests.batcher.core.actors.shell import STALL_S, TICK_S, Shell

ACK_WAIT_S: Final = 10.0
END_S: Final = 900.0


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
        self.queue: dict[str, Message] = {}
        self.requests: dict[str, Request] = {}
        self.policy = self.drawn_policy()
        self.engines = [Engine(self, f"w{n}") for n in range(self.chance.randrange(1, 4))]
        self.shells = [Shell(self, "b1"), Shell(self, "b2")]
        self.at(TICK_S, self.redeliver)
        self.plan(self.publish, self.chance.randrange(10, 60), within_s=30)
        for fault, most in (
            (self.kill_engine, 4),
            (self.stall_engine, 4),
            (self.hang_engine, 3),
            (self.fail_engine, 3),
            (self.slow_down, 3),
            (self.jump, 2),
            (self.deliver_again, 4),
            (self.kill_batcher, 2),
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

    def send_lossy(self, act: Callable[[], None]) -> None:
        """Core NATS: loses, and a gateway may see a message again."""
        if self.now > self.quiet_at or self.chance.random() > self.frame_loss:
            self.send(act)
        if self.chance.random() < 0.02:
            self.send(act)

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
        held = any(len(shell.requests) for shell in self.shells if shell.alive)
        return self.now > self.quiet_at and not held and not self.queue

    def left(self) -> str:
        waiting = [key for key, request in self.requests.items() if request.waiting]
        return f"never ended: {waiting}, in the work queue: {sorted(self.queue)}"

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
        """The work queue heard nothing of a task for too long, though its batcher has it."""
        if self.queue:
            self.deliver(self.queue[self.chance.choice(sorted(self.queue))])

    def kill_batcher(self) -> None:
        victim = self.chance.choice(self.shells)
        victim.alive = False
        for engine in self.engines:
            self.at(0.05, partial(engine.abandon, victim.name))
        name = f"{victim.name}x"
        self.shells = [Shell(self, name) if s is victim else s for s in self.shells]

    def change_policy(self) -> None:
        self.policy = self.drawn_policy()
        for shell in self.shells:
            shell.change_policy(self.policy)

    # The work queue.

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
        task.deadline_unix_ms = int((self.now + chance.random() * 3) * 1e3) if late else 0
        self.requests[request_id] = Request(task, heard_at=self.now)
        self.queue[request_id] = Message(task)
        self.deliver(self.queue[request_id])
        if chance.random() < 0.1:
            self.at(chance.random() * 4, partial(self.cancel, request_id))
        self.at(STALL_S, partial(self.ask_again, request_id))

    def deliver(self, message: Message) -> None:
        message.deliveries += 1
        shell = self.chance.choice(self.shells)
        message.owner, message.progress_at = shell, self.now
        self.send(partial(self.arrive, shell, message, message.deliveries))

    def arrive(self, shell: Shell, message: Message, deliveries: int) -> None:
        request = self.requests[message.task.request_id]
        if not shell.alive or message.task.request_id in shell.requests:
            return
        if deliveries > 1 and not request.waiting:
            shell.requests.drop(message.task.request_id)
        else:
            due = message.task.deadline_unix_ms / 1e3 or float("inf")
            held = request.tokens if deliveries > 1 else []
            row = Row(
                message.task, deliveries=deliveries, produced=held, deadline=due, now=self.now
            )
            shell.requests.add(row, self.now)
        shell.pump()

    def redeliver(self) -> None:
        self.at(TICK_S, self.redeliver)
        for message in list(self.queue.values()):
            owner = message.owner
            if owner is not None and owner.alive and message.task.request_id in owner.requests:
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
        self.to_batchers(lambda shell: shell.requests.confirm([request_id], self.now))

    def ask_for(self, request_id: str) -> None:
        index = len(self.requests[request_id].tokens)
        self.to_batchers(lambda shell: shell.requests.resend(request_id, index))

    def ask_again(self, request_id: str) -> None:
        request = self.requests[request_id]
        if request.waiting:
            if self.now - request.heard_at > STALL_S:
                self.ask_for(request_id)
            self.at(STALL_S, partial(self.ask_again, request_id))

    def cancel(self, request_id: str) -> None:
        if self.requests[request_id].waiting:
            self.requests[request_id].cancelled = True
            self.to_batchers(lambda shell: shell.requests.cancel([request_id], self.now))

    def to_batchers(self, act: Callable[[Shell], None]) -> None:
        for shell in self.shells:
            self.send_lossy(partial(self.control, shell, act))

    def control(self, shell: Shell, act: Callable[[Shell], None]) -> None:
        if shell.alive:
            act(shell)
            shell.pump()

    def answer_question(self, shell: Shell, row: Row) -> None:
        request = self.requests[row.request_id]
        answer = control_pb2.HeldTokensResponse(
            waiting=request.waiting, token_ids=request.tokens, attempt=request.attempt
        )
        lost = self.now < self.quiet_at and self.chance.random() < 0.2
        shell.requests.resumed(row.request_id, None if lost else answer, self.now)
        shell.pump()

    def check_end(self, request: Request) -> None:
        whole = len(request.tokens) == request.task.sampling.max_tokens
        assert not request.waiting, request.task.request_id
        if not request.cancelled and not request.task.deadline_unix_ms:
            assert request.end == frame_pb2.ROW_END_LENGTH
        assert whole or request.end != frame_pb2.ROW_END_LENGTH
