"""An admitted request becomes a stream that waits, and the task that is published for it."""

import secrets
import time
from collections.abc import Callable, Sequence

from gateway.admission import Admitted
from gateway.door.requests import ValidRequest
from gateway.streams.endings import Hops
from gateway.streams.stream import Stream, Ticket
from gateway.streams.transcript import Transcript
from sluice.defaults import HIDDEN_TOKEN_ID
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.internal.v1.task_pb2 import Task
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    Route,
    Started,
)
from sluice.wire.clock import unix_ms


def new_request_id() -> str:
    """A unique name; 15 random bytes are 20 url-safe characters."""
    return f"req-{secrets.token_urlsafe(15)}"


def open_stream(
    request: ValidRequest,
    admitted: Admitted,
    hops: Hops,
    trace_id: str,
    stall_s: float,
    request_id: str,
    on_end: Callable[[Stream], None],
) -> Stream:
    """The stream of a new request; finished already when the caller holds a complete answer."""
    now = time.monotonic()
    ticket = Ticket(
        started=_started(request_id, admitted, trace_id),
        deadline=hops.arrived_at + request.timeout_s,
        with_logprobs=admitted.sampling.logprobs,
        hops=hops,
        key=request.key,
        fingerprint=request.fingerprint,
        on_end=on_end,
        answer=admitted.answer,
    )
    transcript = _transcript(request, admitted)
    stream = Stream(ticket, transcript, stall_s, now, held=len(transcript.token_ids))
    reason = _complete(admitted, transcript)
    if reason is not None:
        stream.finish(reason, RowTimings(), now)
    return stream


def task_of(stream: Stream, request: ValidRequest, admitted: Admitted, gateway_id: str) -> Task:
    """The task of a new request."""
    remaining_ms = (stream.ticket.deadline - time.monotonic()) * 1000
    return Task(
        request_id=stream.request_id,
        gateway=gateway_id,
        model=admitted.plan.model,
        tenant=request.tenant,
        priority_class=request.priority_class,
        deadline_unix_ms=unix_ms() + int(remaining_ms),
        published_unix_ms=unix_ms(),
        prompt_token_ids=admitted.prompt_token_ids,
        produced_token_ids=stream.transcript.token_ids,
        sampling=admitted.sampling,
        workload=request.workload,
    )


def _started(request_id: str, admitted: Admitted, trace_id: str) -> Started:
    plan = admitted.plan
    return Started(
        request_id=request_id,
        trace_id=trace_id,
        model=plan.model,
        route=Route(
            tier=plan.tier, strategy=plan.strategy, reason=plan.reason, degraded=plan.degraded
        ),
        seed=admitted.sampling.seed,
        prompt_tokens=len(admitted.prompt_token_ids),
    )


def _transcript(request: ValidRequest, admitted: Admitted) -> Transcript:
    tokenization = admitted.model.tokenization
    transcript = Transcript(
        tokenization.detokenizer(),
        request.sampling.stops,
        tokenization.stop_token_ids,
        tokenization.token_text,
        admitted.answer.filter if admitted.answer is not None else None,
        request.resume,
    )
    for token_id in _known(request.resume):
        if not transcript.closed:  # a stop string may be in what the caller holds
            transcript.append(token_id)
    return transcript


def _known(resume: Sequence[int]) -> Sequence[int]:
    """The tokens before the first that was hidden from the caller; from there on the answer is computed again."""
    hidden = resume.index(HIDDEN_TOKEN_ID) if HIDDEN_TOKEN_ID in resume else len(resume)
    return resume[:hidden]


def _complete(admitted: Admitted, transcript: Transcript) -> "FinishReason.ValueType | None":
    """Why nothing is left to compute, or None. A stop string is seen by `Stream.finish` itself."""
    held = transcript.token_ids
    if transcript.closed or (held and held[-1] in admitted.sampling.stop_token_ids):
        return FINISH_REASON_STOP
    if len(held) >= admitted.sampling.max_tokens:
        return FINISH_REASON_LENGTH
    return None
