"""The gateway's side of the inner wires, played by a test; it takes frames by the rules of docs/wire.md."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2
from sluice.settings import NatsSettings
from sluice.wire import clock, jetstream, subjects

BOUND_S = 15.0
ACK, NAK, TERM, PROGRESS = b"+ACK", b"-NAK", b"+TERM", b"+WPI"
_numbers = itertools.count(1)


@dataclass
class Answer:
    """What came for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[frame_pb2.Logprobs] = field(default_factory=list)
    final: frame_pb2.Final | None = None
    frames: list[frame_pb2.Frame] = field(default_factory=list)
    attempt: int = 0
    asked_for: int = -1


class GatewayDouble:
    """One gateway.

    Attributes:
        confirms: whether finals are confirmed.
        waits: whether it says that it waits for its requests.
        lose: frames for which this says True never arrive.
        answers: by request.
        reports: of batchers, in order.
        questions: requests that batchers asked about, in order.
        senders: batchers that frames came from, by request.
        settlements: the last word of batchers about a task, by its sequence in the stream.
        deliveries: how often a task had been delivered when a batcher last spoke of it, by its sequence.
        progress: in-progress acknowledgements that batchers sent.
    """

    def __init__(self, client: Client, name: str) -> None:
        self.name = name
        self.client = client
        self.js = client.jetstream()
        self.confirms = True
        self.waits = True
        self.lose: Callable[[frame_pb2.Frame], bool] = lambda frame: False
        self.answers: dict[str, Answer] = {}
        self.reports: list[control_pb2.BatcherReport] = []
        self.questions: list[str] = []
        self.progress = 0
        self.deliveries: dict[int, int] = {}
        self.senders: dict[str, set[str]] = {}
        self._sequences: dict[str, int] = {}
        self.settlements: dict[int, bytes] = {}
        self._changed = asyncio.Condition()

    @staticmethod
    @asynccontextmanager
    async def connected(url: str, name: str = "g1") -> AsyncIterator["GatewayDouble"]:
        """A gateway that is subscribed to everything that concerns it."""
        client = await nats.connect(
            url, error_cb=_ignore, max_reconnect_attempts=-1, reconnect_time_wait=0.1
        )
        double = GatewayDouble(client, name)
        await jetstream.ensure_streams(double.js, NatsSettings())
        await client.subscribe(subjects.frames(name), cb=double._frames)
        await client.subscribe(subjects.held(name), cb=double._held)
        await client.subscribe(subjects.REPORTS, cb=double._report)
        await client.subscribe(f"$JS.ACK.{subjects.TASKS_STREAM}.>", cb=double._settlement)
        await client.flush()
        try:
            yield double
        finally:
            await client.close()

    def task(
        self,
        model: str = "echo",
        *,
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int = 10,
        priority_class: str = "interactive",
        timeout_s: float | None = 60.0,
        logprobs: bool = False,
    ) -> task_pb2.Task:
        """A task nobody has published yet."""
        now = clock.unix_ms()
        return task_pb2.Task(
            request_id=f"r{next(_numbers)}",
            gateway=self.name,
            model=model,
            tenant="default",
            priority_class=priority_class,
            deadline_unix_ms=now + int(timeout_s * 1e3) if timeout_s is not None else 0,
            published_unix_ms=now,
            prompt_token_ids=prompt,
            sampling=task_pb2.Sampling(
                max_tokens=max_tokens,
                top_p=1,
                repetition_penalty=1,
                seed=7,
                logprobs=logprobs,
                top_logprobs=1 if logprobs else 0,
            ),
        )

    async def publish(
        self, task: task_pb2.Task, headers: Mapping[str, str] | None = None
    ) -> task_pb2.Task:
        """Publishes ``task``; returns it."""
        self.answers.setdefault(task.request_id, Answer())
        stored = await self.js.publish(
            subjects.tasks(task.model, task.priority_class),
            task.SerializeToString(),
            headers={"Nats-Msg-Id": task.request_id, **(headers or {})},
        )
        self._sequences[task.request_id] = stored.seq
        return task

    async def ask(self, **fields: object) -> task_pb2.Task:
        """Makes and publishes a task."""
        return await self.publish(self.task(**fields))  # type: ignore[arg-type]

    async def cancel(self, *request_ids: str) -> None:
        """Cancels requests."""
        message = control_pb2.ControlMessage()
        message.cancel.request_ids.extend(request_ids)
        await self._control(message)

    async def resend(self, request_id: str, from_index: int) -> None:
        """Asks for frames again."""
        message = control_pb2.ControlMessage()
        message.resend.request_id = request_id
        message.resend.from_index = from_index
        await self._control(message)

    async def confirm(self, *request_ids: str) -> None:
        """Confirms finals."""
        message = control_pb2.ControlMessage()
        message.confirm.request_ids.extend(request_ids)
        await self._control(message)

    async def until(self, holds: Callable[[], bool], bound_s: float = BOUND_S) -> None:
        """Waits until something that came makes ``holds`` true."""
        async with asyncio.timeout(bound_s), self._changed:
            await self._changed.wait_for(holds)

    async def finished(self, task: task_pb2.Task, bound_s: float = BOUND_S) -> Answer:
        """Waits for the final frame."""
        answer = self.answers[task.request_id]
        await self.until(lambda: answer.final is not None, bound_s)
        return answer

    async def has_tokens(self, task: task_pb2.Task, count: int) -> Answer:
        """Waits for at least ``count`` tokens."""
        answer = self.answers[task.request_id]
        await self.until(lambda: len(answer.token_ids) >= count)
        return answer

    async def batcher_live(self, model: str = "echo", bound_s: float = BOUND_S) -> str:
        """Waits until the last report of some batcher names a live worker; returns the batcher."""

        def live(report: control_pb2.BatcherReport) -> bool:
            return any(m.model == model and m.workers for m in report.models)

        await self.until(lambda: bool(self.reports) and live(self.reports[-1]), bound_s)
        return self.reports[-1].batcher

    async def another_batcher_live(self, model: str = "echo") -> None:
        """Waits until reports of two batchers with a live worker came."""
        await self.until(
            lambda: len({r.batcher for r in self.reports if any(m.workers for m in r.models)}) > 1
        )

    async def reconnected(self, bound_s: float = BOUND_S) -> None:
        """Waits until the connection stands again."""
        count = len(self.reports)
        await self.until(lambda: len(self.reports) > count, bound_s)

    def sequence(self, task: task_pb2.Task) -> int:
        """Of a published task, in its stream."""
        return self._sequences[task.request_id]

    async def settled(self, task: task_pb2.Task, bound_s: float = BOUND_S) -> bytes:
        """Waits until JetStream was told about a task, in-progress aside; returns the last word: ACK, NAK or TERM."""
        sequence = self.sequence(task)
        await self.until(lambda: sequence in self.settlements, bound_s)
        return self.settlements[sequence]

    async def tasks_left(self) -> int:
        """Messages in the work queue."""
        info = await self.js.stream_info(subjects.TASKS_STREAM)
        return info.state.messages

    async def dead_letter(self, model: str = "echo", bound_s: float = BOUND_S) -> Msg:
        """Waits for a dead letter of ``model``."""
        subscription = await self.js.subscribe(
            f"{subjects.DEAD_LETTERS}.{model}.*", ordered_consumer=True
        )
        return await subscription.next_msg(bound_s)

    async def ack_wait(self, wait_s: float, model: str = "echo") -> None:
        """Sets how long JetStream waits for an acknowledgement of interactive tasks."""
        name = subjects.tasks_consumer(model, "interactive")
        info = await self.js.consumer_info(subjects.TASKS_STREAM, name)
        config: ConsumerConfig = info.config.evolve(ack_wait=wait_s)
        await self.js.add_consumer(subjects.TASKS_STREAM, config)

    async def _control(self, message: control_pb2.ControlMessage) -> None:
        await self.client.publish(subjects.CONTROL, message.SerializeToString())

    async def _frames(self, message: Msg) -> None:
        bundle = frame_pb2.FrameBundle.FromString(message.data)
        for frame in bundle.frames:
            self.senders.setdefault(frame.request_id, set()).add(bundle.batcher)
            if not self.lose(frame):
                await self._take(frame)
        async with self._changed:
            self._changed.notify_all()

    async def _take(self, frame: frame_pb2.Frame) -> None:
        answer = self.answers.setdefault(frame.request_id, Answer())
        if frame.attempt < answer.attempt or answer.final is not None:
            return
        answer.attempt = frame.attempt
        answer.frames.append(frame)
        known = len(answer.token_ids) - frame.start_index
        if known < 0:
            if answer.asked_for != len(answer.token_ids):
                answer.asked_for = len(answer.token_ids)
                await self.resend(frame.request_id, answer.asked_for)
            return
        answer.token_ids.extend(frame.token_ids[known:])
        answer.logprobs.extend(frame.logprobs[known:])
        if frame.HasField("final"):
            answer.final = frame.final
            if self.confirms:
                await self.confirm(frame.request_id)

    async def _held(self, message: Msg) -> None:
        request = control_pb2.HeldTokensRequest.FromString(message.data)
        self.questions.append(request.request_id)
        answer = self.answers.get(request.request_id)
        reply = control_pb2.HeldTokensResponse(waiting=False)
        if self.waits and answer is not None and (answer.final is None or not self.confirms):
            reply = control_pb2.HeldTokensResponse(
                waiting=True, token_ids=answer.token_ids, attempt=answer.attempt
            )
        await message.respond(reply.SerializeToString())
        async with self._changed:
            self._changed.notify_all()

    async def _settlement(self, message: Msg) -> None:
        # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>. ...
        deliveries, sequence = (int(part) for part in message.subject.split(".")[4:6])
        self.deliveries[sequence] = deliveries
        if message.data == PROGRESS:
            self.progress += 1
        else:
            self.settlements[sequence] = message.data or ACK
        async with self._changed:
            self._changed.notify_all()

    async def _report(self, message: Msg) -> None:
        self.reports.append(control_pb2.BatcherReport.FromString(message.data))
        async with self._changed:
            self._changed.notify_all()


async def _ignore(_: Exception) -> None:
    """Servers are restarted on purpose."""


def echo_of(task: task_pb2.Task) -> list[int]:
    """What the echo engine answers."""
    prompt = task.prompt_token_ids
    return [prompt[index % len(prompt)] for index in range(task.sampling.max_tokens)]
