"""The test plays the batcher: it takes tasks and says on the wire what a batcher would say."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from sluice.internal.v1 import control_pb2, frame_pb2
from sluice.internal.v1.task_pb2 import Task
from sluice.wire import subjects
from sluice.wire.codec import pack, unpack
from sluice.wire.connection import settle

BOUND_S: Final = 60.0
REPORT_S: Final = 1.0
TIMINGS: Final = frame_pb2.TaskTimings(queue_ms=1, batch_ms=2, prefill_ms=3, decode_ms=4)


class WireBatcher:
    """A batcher without a policy and without workers.

    Attributes:
        name: its id.
        control: what gateways told it of rows, in order.
    """

    def __init__(
        self, client: Client, jetstream: JetStreamContext, name: str, gateway: str
    ) -> None:
        self.client = client
        self.jetstream = jetstream
        self.name = name
        self._gateway = gateway
        self.control: list[control_pb2.ControlMessage] = []
        self._report: control_pb2.BatcherReport | None = None
        self._control_grew = asyncio.Event()
        self._tasks: defaultdict[tuple[str, str], asyncio.Queue[Msg]] = defaultdict(asyncio.Queue)

    async def task(self, model: str = "small", priority_class: str = "interactive") -> Task:
        """The next task; its gateway is told that it is here."""
        return unpack(Task, (await self.message(model, priority_class)).data)

    async def message(self, model: str = "small", priority_class: str = "interactive") -> Msg:
        message = await self.arrived(model, priority_class)
        await self.hold(unpack(Task, message.data))
        return message

    async def arrived(self, model: str = "small", priority_class: str = "interactive") -> Msg:
        """The next task; its gateway is not told that it is here."""
        async with asyncio.timeout(BOUND_S):
            return await self._tasks[model, priority_class].get()

    async def hold(self, task: Task) -> None:
        """Says that it has a row."""
        await self._say(task, pending=[_ref(task)])

    async def forget(self, task: Task) -> None:
        """Says that it does not have a row."""
        await self._say(task, unknown=[_ref(task)])

    async def send(self, task: Task, *frames: frame_pb2.Frame) -> None:
        """Frames of one bundle; names and attempts are filled in."""
        for frame in frames:
            frame.request_id = frame.request_id or task.request_id
            frame.attempt = frame.attempt or task.attempt
        await self._say(task, frames=frames)

    async def _say(self, task: Task, **words: Any) -> None:
        bundle = frame_pb2.FrameBundle(batcher=self.name, **words)
        await self.client.publish(subjects.frames(task.gateway), pack(bundle))
        await self.client.flush()

    async def report(
        self,
        *models: str,
        batcher: str = "",
        leaving: bool = False,
        slots: int = 8,
        classes: Sequence[control_pb2.ClassReport] = (),
        tokens_per_s: float = 0.0,
        drains_revision: int = 0,
    ) -> None:
        entries = [
            control_pb2.ModelReport(
                model=m,
                workers=1,
                slots=slots,
                queued=2,
                classes=classes,
                tokens_per_s=tokens_per_s,
            )
            for m in models
        ]
        report = control_pb2.BatcherReport(
            batcher=batcher or self.name,
            models=entries,
            leaving=leaving,
            drains_revision=drains_revision,
        )
        if report.batcher == self.name:
            self._report = None if leaving else report
        await self.client.publish(subjects.report(report.batcher), pack(report))
        await self.client.flush()

    async def repeat_report(self) -> None:
        """Repeats its last report, as a batcher does, until it is cancelled."""
        while True:
            await asyncio.sleep(REPORT_S)
            if self._report is not None:
                await self.client.publish(subjects.report(self.name), pack(self._report))

    async def heard(
        self, wanted: Callable[[control_pb2.ControlMessage], bool]
    ) -> control_pb2.ControlMessage:
        """The first control message that is ``wanted``, waiting for it."""
        async with asyncio.timeout(BOUND_S):
            while True:
                self._control_grew.clear()
                for message in self.control:
                    if wanted(message):
                        return message
                await self._control_grew.wait()

    async def cancelled(self, task: Task) -> control_pb2.ControlMessage:
        return await self.heard(
            lambda m: any(ref.request_id == task.request_id for ref in m.cancel.tasks)
        )

    async def asked_again(self, task: Task, index: int) -> control_pb2.ControlMessage:
        return await self.heard(
            lambda m: any(
                asked.request_id == task.request_id and asked.next_index == index
                for asked in m.query.tasks
            )
        )

    async def on_message(self, message: Msg) -> None:
        if message.subject == subjects.task_to(self.name):
            task = unpack(Task, message.data)
            if self._gateway in ("", task.gateway):
                self._tasks[task.model, task.priority_class].put_nowait(message)
        else:
            told = unpack(control_pb2.ControlMessage, message.data)
            if not told.HasField("announce"):  # it says nothing of rows
                self.control.append(told)
                self._control_grew.set()


def _ref(task: Task) -> frame_pb2.TaskRef:
    return frame_pb2.TaskRef(request_id=task.request_id, attempt=task.attempt)


def frame(
    start: int,
    token_ids: Sequence[int] = (),
    *,
    attempt: int = 0,
    logprobs: Sequence[frame_pb2.Logprobs] = (),
    end: "frame_pb2.TaskEnd.ValueType | None" = None,
    error: frame_pb2.TaskError | None = None,
    request_id: str = "",
) -> frame_pb2.Frame:
    final = None if end is None else frame_pb2.Final(end=end, error=error, timings=TIMINGS)
    return frame_pb2.Frame(
        request_id=request_id,
        attempt=attempt,
        start_index=start,
        token_ids=token_ids,
        logprobs=logprobs,
        final=final,
    )


def last(start: int, token_ids: Sequence[int] = (), attempt: int = 0) -> frame_pb2.Frame:
    return frame(start, token_ids, attempt=attempt, end=frame_pb2.TASK_END_STOP)


@asynccontextmanager
async def wire_batcher(url: str, name: str = "b1", gateway: str = "") -> AsyncIterator[WireBatcher]:
    """``gateway``: whose tasks it takes; empty: all."""
    client = await nats.connect(url)
    try:
        batcher = WireBatcher(client, client.jetstream(), name, gateway)
        await client.subscribe(subjects.all_to(name), cb=batcher.on_message)
        await client.subscribe(subjects.CONTROL, cb=batcher.on_message)
        await settle(client, BOUND_S)
        repeating = asyncio.ensure_future(batcher.repeat_report())
        yield batcher
        repeating.cancel()
    finally:
        await client.close()
