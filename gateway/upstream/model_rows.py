"""Rows that the gateway itself wants an answer to: the questions to guards, and shadows. No caller reads them."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.admission.pipeline import Admission
from gateway.admission.prompts import PreparedPrompt
from gateway.streaming.endings import Hops
from gateway.streaming.leg import Leg
from gateway.streaming.registry import Registry
from gateway.streaming.stream import Stream
from gateway.streaming.ticket import Ticket
from gateway.upstream.dispatch import Dispatch
from gateway.upstream.tasks import task_of
from gateway.validation.requests import ValidRequest
from sluice.errors import Cancelled, SluiceError
from sluice.v1.inference_pb2 import Started


@dataclass(frozen=True)
class Rows:
    """What all such rows share."""

    admission: Admission
    registry: Registry
    dispatch: Dispatch
    stall_s: float


@dataclass(frozen=True)
class Wanted:
    """What a row asks.

    Attributes:
        request: whose tenant and class it has.
        deadline: monotonic seconds; then it fails with DeadlinePassed.
        headers: trace context.
        workload: what kind of work it is; answers of one kind are of like length.
        with_logprobs: whether they are kept.
    """

    request: ValidRequest
    prepared: PreparedPrompt
    leg: Leg
    deadline: float
    headers: Mapping[str, str]
    workload: str
    with_logprobs: bool = False


class OwnRow:
    """One such row.

    Attributes:
        stream: its answer, as far as it has come.
    """

    def __init__(self, rows: Rows, wanted: Wanted) -> None:
        self._rows = rows
        self._wanted = wanted
        self._ended = asyncio.Event()
        leg = wanted.leg
        ticket = Ticket(
            started=Started(request_id=leg.row_id, model=leg.model),
            deadline=wanted.deadline,
            with_logprobs=wanted.with_logprobs,
            hops=Hops(arrived_at=time.monotonic()),
            on_end=lambda _: self._ended.set(),
        )
        self.stream = Stream(ticket, leg)

    async def answered(self) -> Stream:
        """Sends the row; returns its stream when that has ended. Who is cancelled here cancels the row.

        Raises:
            SluiceError: there is no answer.
        """
        rows, stream = self._rows, self.stream
        rows.registry.open(stream)
        rows.admission.sent(self._wanted.prepared, self._wanted.request.priority_class)
        try:
            await self._publish()
        finally:
            # Without effect when it has ended. Nobody wants the row any more.
            rows.registry.fail(stream, Cancelled("nobody waits for the answer any more"))
        if stream.error is not None:
            raise stream.error
        return stream

    async def _publish(self) -> None:
        dispatch, wanted, stream = self._rows.dispatch, self._wanted, self.stream
        task = task_of(stream, wanted.request, wanted.prepared, dispatch.gateway_id)
        task.workload = wanted.workload
        try:
            await dispatch.publish(task, wanted.headers, wanted.deadline)
        except SluiceError:
            # Without an acknowledgement the task may have been stored all the same: frames are proof.
            if not self._ended.is_set():
                raise
        stream.published()
        await self._ended.wait()
