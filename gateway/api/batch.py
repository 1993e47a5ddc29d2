"""Answers GenerateBatch: many requests in one call, each of which is a request as every other.

1. Each request is a call of its own inside the caller's: admitted, limited, recorded, traced and kept by its
   idempotency key for itself. Its error is a result, not that of the call.
2. They have one deadline, shortly before that of the call, so that the results arrive; what has not begun by then does
   not begin, and leaves no record. When the caller goes, all end.
3. A part of them runs at the same time, at most half of what the tenant may have, and they begin one after the other,
   so that neither other calls of the tenant nor the event loop wait for a batch.
4. The answers together are no larger than what clients of gRPC take.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.admission.request_context import Call, ItemCall, fail_with
from gateway.api.generate import Generator
from gateway.api.whole import cost_of, whole_answer
from gateway.identity.caller import Caller
from gateway.telemetry.request_log import RequestLog
from gateway.validation.requests import CLASSES_OF, class_of
from sluice.errors import DeadlinePassed, InvalidRequest, MessageTooLarge, SluiceError
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1 import inference_pb2 as pb
from sluice.wire.clock import set_duration
from sluice.wire.enums import value_of
from sluice.wire.subjects import RANKS, URGENT_CLASS

REQUESTS_MAX: Final = 256
"""Most requests of a call."""
RUNNING_MAX: Final = 64
"""Most requests of a call that run at the same time."""
RESPONSE_BYTES: Final = 4 * 1024 * 1024 - 64 * 1024
"""Largest response, in bytes: gRPC clients take 4 MiB unless configured otherwise."""
ANSWER_RATIO: Final = 4
"""Size of all answers of a call, as a multiple of the largest message that the gateway takes."""
RETURN_S: Final = 0.25
"""How long before the call's deadline its requests end, in seconds, so that the results still arrive."""
ROUNDING: Final = 0.01
"""Share of a timeout by which gRPC clients may round it up on the wire: 100.1 s are sent as 101 s."""
RETURN_SHARE_MAX: Final = 0.05
"""Largest share of a timeout that is kept for the return of the results."""


async def answer_batch(
    generator: Generator, request: pb.GenerateBatchRequest, call: Call
) -> pb.GenerateBatchResponse:
    """Answer all requests of a call.

    Raises:
        InvalidRequest: the call as a whole is wrong.
        DeadlinePassed: no time is left.
    """
    _check(request)
    timeout_s = generator.timeout_s(call)
    if call.remaining_s is not None:
        timeout_s = requests_timeout_s(timeout_s)
    with RequestLog(generator.tracer, names.SPAN_GENERATE_BATCH, call.metadata) as log:
        log.describe({names.TENANT: call.caller.tenant, names.TEXTS: len(request.requests)})
        metadata = {**call.metadata, **headers_of(log.server)}
        batch = _Batch(generator, request, call.caller, metadata, time.monotonic() + timeout_s)
        results = await batch.answer(request.requests)
    return pb.GenerateBatchResponse(results=results, currency=generator.records.currency)


def requests_timeout_s(timeout_s: float) -> float:
    """Return how long the requests of a call may run whose timeout arrived as `timeout_s`, in seconds."""
    return timeout_s - min(RETURN_S + ROUNDING * timeout_s, RETURN_SHARE_MAX * timeout_s)


def _check(request: pb.GenerateBatchRequest) -> None:
    """Raise InvalidRequest unless the call as a whole is right."""
    count = len(request.requests)
    if not 1 <= count <= REQUESTS_MAX:
        raise InvalidRequest.of(
            "requests", f"has {count} entries; send 1 to {REQUESTS_MAX} in a call, or make a job"
        )
    if request.priority not in CLASSES_OF:
        raise InvalidRequest.of("priority", "is none of the known priorities")


class _Batch:
    """The requests of one call."""

    def __init__(
        self,
        generator: Generator,
        request: pb.GenerateBatchRequest,
        caller: Caller,
        metadata: Mapping[str, str],
        deadline: float,
    ) -> None:
        self._generator = generator
        self._priority = request.priority
        self._class = class_of(request)
        self._caller = caller
        self._metadata = metadata
        self._deadline = deadline
        own = generator.limiter.tenant_limits[RANKS[self._class]]
        self._slots = asyncio.Semaphore(max(1, min(RUNNING_MAX, own // 2)))
        self._bytes = 0
        self._bytes_max = min(RESPONSE_BYTES, ANSWER_RATIO * generator.settings.max_message_bytes)

    async def answer(self, requests: Sequence[pb.GenerateRequest]) -> list[pb.GenerateBatchResult]:
        """Return the result of each request, in order."""
        results = [pb.GenerateBatchResult() for _ in requests]
        async with asyncio.TaskGroup() as group:
            for request, result in zip(requests, results, strict=True):
                await self._slots.acquire()
                if time.monotonic() >= self._deadline:
                    # Without any work: the results of the others have to arrive in time.
                    self._slots.release()
                    _set_error(result.error, DeadlinePassed("the deadline passed before it began"))
                    continue
                group.create_task(self._run(request, result))
                await asyncio.sleep(0)  # let other calls run before the next request begins
                if self._class != URGENT_CLASS:  # the call is read no faster than its entries begin
                    await self._generator.limiter.pacer.wait(is_bounded=False)
        return results

    async def _run(self, request: pb.GenerateRequest, result: pb.GenerateBatchResult) -> None:
        left_s = max(0.0, self._deadline - time.monotonic())
        call = ItemCall(self._caller, self._metadata, left_s)
        try:
            await fail_with(self._answer(request, result, call), call.fail, call)
        finally:
            self._slots.release()
        if call.error is not None:
            _set_error(result.error, call.error)

    async def _answer(
        self, request: pb.GenerateRequest, result: pb.GenerateBatchResult, call: Call
    ) -> None:
        if request.priority not in (pb.PRIORITY_UNSPECIFIED, self._priority):
            raise InvalidRequest.of("priority", "differs from that of the batch; leave it out")
        self._check_room()
        request.priority = value_of(pb.Priority, self._class)
        with self._generator.limiter.running(self._class, self._caller.tenant):
            answer, _ = await whole_answer(self._generator, request, call)
        result.cost = cost_of(self._generator.catalog, answer.finished.attempts)
        self._bytes += answer.ByteSize()
        self._check_room()
        result.answer.CopyFrom(answer)

    def _check_room(self) -> None:
        """Raise MessageTooLarge if the answers are larger than a response may be."""
        if self._bytes > self._bytes_max:
            raise MessageTooLarge(
                f"the answers of the batch have more than {self._bytes_max} bytes; send fewer requests in a call",
                metadata={"bytes": str(self._bytes), "limit_bytes": str(self._bytes_max)},
            )


def _set_error(message: pb.GenerateBatchError, error: SluiceError) -> None:
    status = error.to_status()
    message.code, message.message, message.reason = status.code, status.message, error.reason
    message.metadata.update(error.metadata)
    if error.retry_after_s is not None:
        set_duration(message.retry_after, error.retry_after_s * 1e3)
