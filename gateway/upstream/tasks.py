"""An admitted request becomes a stream that waits, and the task that is published for it."""

import secrets
import time
from collections.abc import Sequence

from gateway.admission.pipeline import AdmittedRequest
from gateway.admission.prompts import PreparedPrompt
from gateway.streaming.assembler import Assembler
from gateway.streaming.leg import Leg
from gateway.streaming.stream import Stream
from gateway.streaming.ticket import Ticket
from gateway.streaming.transcript import Transcript
from gateway.validation.requests import ValidRequest
from sluice.defaults import HIDDEN_TOKEN_ID
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.internal.v1.task_pb2 import Sampling, Task
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    Route,
    RouteStrategy,
    Started,
)
from sluice.wire.clock import unix_ms
from sluice.wire.enums import value_of


def new_request_id() -> str:
    """A unique name; 15 random bytes are 20 url-safe characters."""
    return f"req-{secrets.token_urlsafe(15)}"


def open_stream(
    request: ValidRequest, admitted: AdmittedRequest, ticket: Ticket, stall_s: float
) -> Stream:
    """The stream of a new request; finished already when the caller holds a complete answer."""
    now = time.monotonic()
    first = leg_of(request, admitted.first, ticket.started.request_id, request.resume, stall_s, now)
    stream = Stream(ticket, first)
    reason = _complete(admitted.first.sampling, first.transcript)
    if reason is not None:
        stream.finish(reason, RowTimings(), now)
    return stream


def leg_of(
    request: ValidRequest,
    prepared: PreparedPrompt,
    row_id: str,
    held: Sequence[int],
    stall_s: float,
    now: float,
) -> Leg:
    """A model's leg of the answer; ``held`` are the tokens that the caller has been shown before."""
    tokenizer = prepared.model.tokenizer
    answer = None if prepared.inspect is None else prepared.inspect()
    transcript = Transcript(
        tokenizer.detokenizer(),
        tuple(request.sampling.stop),
        tokenizer.stop_token_ids,
        tokenizer.token_text,
        None if answer is None else answer.filter,
        held,
        request.sampling.logprobs,
    )
    for token_id in _known(held):
        if not transcript.closed:  # a stop string may be in what the caller holds
            transcript.append(token_id)
    assembler = Assembler(len(transcript.token_ids), stall_s, now)
    return Leg(
        row_id, prepared.model.name, len(prepared.prompt_token_ids), transcript, assembler, answer
    )


def task_of(
    stream: Stream,
    request: ValidRequest,
    prepared: PreparedPrompt,
    gateway_id: str,
    leg: Leg | None = None,
) -> Task:
    """The task of ``leg``, or of the one whose answer the stream has now."""
    leg = leg or stream.leg
    remaining_ms = (stream.ticket.deadline - time.monotonic()) * 1000
    return Task(
        request_id=leg.row_id,
        gateway=gateway_id,
        model=prepared.model.name,
        tenant=request.tenant,
        priority_class=request.priority_class,
        deadline_unix_ms=unix_ms() + int(remaining_ms),
        published_unix_ms=unix_ms(),
        prompt_token_ids=prepared.prompt_token_ids,
        produced_token_ids=leg.transcript.token_ids,
        sampling=prepared.sampling,
        workload=request.workload,
    )


def started_of(request_id: str, admitted: AdmittedRequest, trace_id: str) -> Started:
    """The first event of the answer."""
    plan, first = admitted.plan, admitted.first
    return Started(
        request_id=request_id,
        trace_id=trace_id,
        model=plan.model,
        route=Route(
            tier=plan.tier,
            strategy=value_of(RouteStrategy, plan.strategy),
            reason=plan.reason,
            degraded=plan.degraded,
        ),
        seed=first.sampling.seed,
        prompt_tokens=len(first.prompt_token_ids),
    )


def _known(resume: Sequence[int]) -> Sequence[int]:
    """The tokens before the first that was hidden from the caller; from there on the answer is computed again."""
    hidden = resume.index(HIDDEN_TOKEN_ID) if HIDDEN_TOKEN_ID in resume else len(resume)
    return resume[:hidden]


def _complete(sampling: Sampling, transcript: Transcript) -> "FinishReason.ValueType | None":
    """Why nothing is left to compute, or None. A stop string is seen by `Stream.finish` itself."""
    held = transcript.token_ids
    if transcript.closed or (held and held[-1] in sampling.stop_token_ids):
        return FINISH_REASON_STOP
    if len(held) >= sampling.max_tokens:
        return FINISH_REASON_LENGTH
    return None
