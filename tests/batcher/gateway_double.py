"""The gateway's side of the inner wires, played by a test; it takes frames by the rules of docs/internals/wire.md."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2
from sluice.wire import subjects
from sluice.wire.connection import settle

BOUND_S = 60.0
"""Only a test that fails waits for so long; a busy machine may need some of it."""
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
    """One gateway. It sends again what a batcher returns or does not know, and what a test says is lost.

    Attributes:
        lose: frames for which this says True never arrive.
        answers: by request.
        reports: of batchers, in order.
        held: by request, batchers that said that they have it, in order.
        unknown: by request, how often a batcher did not know it.
        returned: requests that batchers returned, in order.
        senders: batchers that frames came from, by request.
    """

    def __init__(self, client: Client, name: str) -> None:
        self.name = name
        self.client = client
        self.lose: Callable[[frame_pb2.Frame], bool] = lambda frame: False
        self.answers: dict[str, Answer] = {}
        self.reports: list[control_pb2.BatcherReport] = []
        self.held: defaultdict[str, list[str]] = defaultdict(list)
        self.unknown: defaultdict[str, int] = defaultdict(int)
        self.returned: list[str] = []
        self.senders: dict[str, set[str]] = {}
        self._live: dict[str, control_pb2.BatcherReport] = {}
        self._sent: dict[str, tuple[task_pb2.Task, str]] = {}
        """By request, its task and the batcher; empty: none yet."""
        self._headers: dict[str, Mapping[str, str] | None] = {}
        self._changed = asyncio.Condition()

    @staticmethod
    @asynccontextmanager
    async def connected(url: str, name: str = "g1") -> AsyncIterator["GatewayDouble"]:
        """A gateway that is subscribed to everything that concerns it."""
        client = await nats.connect(
            url, error_cb=_ignore, max_reconnect_attempts=-1, reconnect_time_wait=0.1
        )
        double = GatewayDouble(client, name)
        await client.subscribe(subjects.frames(name), cb=double._frames)
        await client.subscribe(subjects.ALL_REPORTS, cb=double._report)
        await settle(client, BOUND_S)
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
        return task_pb2.Task(
            request_id=f"r{next(_numbers)}",
            gateway=self.name,
            model=model,
            tenant="default",
            priority_class=priority_class,
            timeout_ms=max(1, int(timeout_s * 1e3)) if timeout_s is not None else 0,
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
        """Sends ``task`` to a batcher as soon as there is one; returns it."""
        self.answers.setdefault(task.request_id, Answer())
        self._headers[task.request_id] = headers
        self._sent[task.request_id] = task, ""
        await self._send(task)
        return task

    async def ask(self, **fields: object) -> task_pb2.Task:
        """Makes and publishes a task."""
        return await self.publish(self.task(**fields))  # type: ignore[arg-type]

    async def cancel(self, *request_ids: str) -> None:
        """Cancels requests."""
        for request_id in request_ids:
            task, _ = self._sent[request_id]
            ref = frame_pb2.TaskRef(request_id=request_id, attempt=task.attempt)
            message = control_pb2.ControlMessage(
                gateway=self.name, cancel=control_pb2.Cancel(tasks=[ref])
            )
            await self._control(request_id, message)

    async def query(self, request_id: str, from_index: int | None = None) -> None:
        """Asks what became of a row."""
        task, _ = self._sent[request_id]
        index = len(self.answers[request_id].token_ids) if from_index is None else from_index
        asked = control_pb2.TaskProgress(
            request_id=request_id, attempt=task.attempt, next_index=index
        )
        message = control_pb2.ControlMessage(
            gateway=self.name, query=control_pb2.TaskQuery(tasks=[asked])
        )
        await self._control(request_id, message)

    async def lost(self, batcher: str) -> None:
        """A batcher is lost: its rows go to others."""
        self._live.pop(batcher, None)
        for request_id, (task, owner) in list(self._sent.items()):
            if owner == batcher and self.answers[request_id].final is None:
                await self._send_again(task)

    async def _send(self, task: task_pb2.Task) -> None:
        live = [
            name
            for name, report in self._live.items()
            if any(entry.model == task.model and entry.workers for entry in report.models)
        ]
        if not live:
            return
        loads = [batcher for _, batcher in self._sent.values()]
        batcher = min(live, key=loads.count)
        self._sent[task.request_id] = task, batcher
        await self.client.publish(
            subjects.task_to(batcher),
            task.SerializeToString(),
            headers=dict(self._headers[task.request_id] or {}),
        )

    async def _send_again(self, task: task_pb2.Task) -> None:
        answer = self.answers[task.request_id]
        again = task_pb2.Task()
        again.CopyFrom(task)
        again.attempt = task.attempt + 1
        again.produced_token_ids[:] = answer.token_ids
        answer.attempt = again.attempt
        self._sent[task.request_id] = again, ""
        await self._send(again)

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

    async def taken(self, task: task_pb2.Task) -> str:
        """Waits until a batcher has said that it has the task; returns the batcher."""
        await self.until(lambda: bool(self.held[task.request_id]))
        return self.held[task.request_id][-1]

    async def _control(self, request_id: str, message: control_pb2.ControlMessage) -> None:
        batcher = self._sent[request_id][1]
        subject = subjects.control_to(batcher) if batcher else subjects.CONTROL
        await self.client.publish(subject, message.SerializeToString())

    async def _frames(self, message: Msg) -> None:
        bundle = frame_pb2.FrameBundle.FromString(message.data)
        for ref in bundle.pending:
            self._hold(bundle.batcher, ref)
        for ref in bundle.unknown:
            await self._forget(bundle.batcher, ref)
        for frame in bundle.frames:
            self.senders.setdefault(frame.request_id, set()).add(bundle.batcher)
            if not self.lose(frame):
                await self._take(frame)
        async with self._changed:
            self._changed.notify_all()

    def _hold(self, batcher: str, ref: frame_pb2.TaskRef) -> None:
        self.held[ref.request_id].append(batcher)
        task, owner = self._sent[ref.request_id]
        if not owner:
            self._sent[ref.request_id] = task, batcher

    async def _forget(self, batcher: str, ref: frame_pb2.TaskRef) -> None:
        self.unknown[ref.request_id] += 1
        task, owner = self._sent[ref.request_id]
        if owner == batcher and task.attempt == ref.attempt:
            await self._send_again(task)

    async def _take(self, frame: frame_pb2.Frame) -> None:
        answer = self.answers.setdefault(frame.request_id, Answer())
        if frame.attempt < answer.attempt or answer.final is not None:
            return
        if frame.final.end == frame_pb2.TASK_END_RETURNED:
            self.returned.append(frame.request_id)
            task, _ = self._sent[frame.request_id]
            if frame.attempt == task.attempt:
                await self._send_again(task)
            return
        answer.attempt = frame.attempt
        answer.frames.append(frame)
        known = len(answer.token_ids) - frame.start_index
        if known < 0:
            if answer.asked_for != len(answer.token_ids):
                answer.asked_for = len(answer.token_ids)
                await self.query(frame.request_id)
            return
        answer.token_ids.extend(frame.token_ids[known:])
        answer.logprobs.extend(frame.logprobs[known:])
        if frame.HasField("final"):
            answer.final = frame.final

    async def _report(self, message: Msg) -> None:
        report = control_pb2.BatcherReport.FromString(message.data)
        self.reports.append(report)
        if report.leaving:
            self._live.pop(report.batcher, None)
        else:
            self._live[report.batcher] = report
            for task, batcher in list(self._sent.values()):
                if not batcher:
                    await self._send(task)
        async with self._changed:
            self._changed.notify_all()


async def _ignore(_: Exception) -> None:
    """Servers are restarted on purpose."""


def echo_of(task: task_pb2.Task) -> list[int]:
    """What the echo engine answers."""
    prompt = task.prompt_token_ids
    return [prompt[index % len(prompt)] for index in range(task.sampling.max_tokens)]
