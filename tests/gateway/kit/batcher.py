"""The test plays the batcher: it takes tasks out of JetStream and says on the wire what a batcher would say."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from sluice.internal.v1.control_pb2 import (
    BatcherReport,
    ClassReport,
    ControlMessage,
    HeldTokensRequest,
    HeldTokensResponse,
    ModelReport,
)
from sluice.internal.v1.frame_pb2 import (
    ROW_END_STOP,
    Frame,
    FrameBundle,
    Logprobs,
    RowEnd,
    RowError,
    RowTimings,
)
from sluice.internal.v1.frame_pb2 import (
    Final as FinalFrame,
)
from sluice.internal.v1.task_pb2 import Task
from sluice.wire import subjects
from sluice.wire.codec import pack, unpack
from sluice.wire.connection import settle

BOUND_S: Final = 5.0
TIMINGS: Final = RowTimings(queue_ms=1, batch_ms=2, prefill_ms=3, decode_ms=4)


class WireBatcher:
    """A batcher without a policy and without workers."""

    def __init__(self, client: Client, jetstream: JetStreamContext) -> None:
        self.client = client
        self.jetstream = jetstream
        self.control: list[ControlMessage] = []
        self._control_grew = asyncio.Event()
        self._consumers: dict[str, JetStreamContext.PullSubscription] = {}

    async def task(self, model: str = "small", priority_class: str = "interactive") -> Task:
        """The next task, acknowledged."""
        return unpack(Task, (await self.message(model, priority_class)).data)

    async def message(self, model: str = "small", priority_class: str = "interactive") -> Msg:
        subject = subjects.tasks(model, priority_class)
        if subject not in self._consumers:
            self._consumers[subject] = await self.jetstream.pull_subscribe(
                subject, durable=subjects.tasks_consumer(model, priority_class)
            )
        (message,) = await self._consumers[subject].fetch(1, timeout=BOUND_S)
        await message.ack()
        return message

    async def send(self, task: Task, *frames: Frame) -> None:
        """Frames of one bundle; names and attempts are filled in."""
        for frame in frames:
            frame.request_id = frame.request_id or task.request_id
        bundle = FrameBundle(batcher="b1", frames=frames)
        await self.client.publish(subjects.frames(task.gateway), pack(bundle))
        await self.client.flush()

    async def report(
        self,
        *models: str,
        batcher: str = "b1",
        leaving: bool = False,
        slots: int = 8,
        classes: Sequence[ClassReport] = (),
        tokens_per_s: float = 0.0,
    ) -> None:
        entries = [
            ModelReport(
                model=m,
                workers=1,
                slots=slots,
                queued=2,
                classes=classes,
                tokens_per_s=tokens_per_s,
            )
            for m in models
        ]
        report = BatcherReport(batcher=batcher, models=entries, leaving=leaving)
        await self.client.publish(subjects.REPORTS, pack(report))
        await self.client.flush()

    async def held(self, task: Task) -> HeldTokensResponse:
        question = HeldTokensRequest(request_id=task.request_id)
        answer = await self.client.request(
            subjects.held(task.gateway), pack(question), timeout=BOUND_S
        )
        return unpack(HeldTokensResponse, answer.data)

    async def heard(self, wanted: Callable[[ControlMessage], bool]) -> ControlMessage:
        """The first control message that is ``wanted``, waiting for it."""
        async with asyncio.timeout(BOUND_S):
            while True:
                self._control_grew.clear()
                for message in self.control:
                    if wanted(message):
                        return message
                await self._control_grew.wait()

    async def cancelled(self, task: Task) -> ControlMessage:
        return await self.heard(lambda m: task.request_id in m.cancel.request_ids)

    async def confirmed(self, task: Task) -> ControlMessage:
        return await self.heard(lambda m: task.request_id in m.confirm.request_ids)

    async def asked_again(self, task: Task, index: int) -> ControlMessage:
        return await self.heard(
            lambda m: m.resend.request_id == task.request_id and m.resend.from_index == index
        )

    async def on_control(self, message: Msg) -> None:
        self.control.append(unpack(ControlMessage, message.data))
        self._control_grew.set()


def frame(
    start: int,
    token_ids: Sequence[int] = (),
    *,
    attempt: int = 0,
    logprobs: Sequence[Logprobs] = (),
    end: "RowEnd.ValueType | None" = None,
    error: RowError | None = None,
    request_id: str = "",
) -> Frame:
    final = None if end is None else FinalFrame(end=end, error=error, timings=TIMINGS)
    return Frame(
        request_id=request_id,
        attempt=attempt,
        start_index=start,
        token_ids=token_ids,
        logprobs=logprobs,
        final=final,
    )


def last(start: int, token_ids: Sequence[int] = (), attempt: int = 0) -> Frame:
    return frame(start, token_ids, attempt=attempt, end=ROW_END_STOP)


@asynccontextmanager
async def wire_batcher(url: str) -> AsyncIterator[WireBatcher]:
    client = await nats.connect(url)
    try:
        batcher = WireBatcher(client, client.jetstream())
        await client.subscribe(subjects.CONTROL, cb=batcher.on_control)
        await settle(client, BOUND_S)
        yield batcher
    finally:
        await client.close()
