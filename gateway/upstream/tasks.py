"""What is sent and received for one row: its attempt, its task, and the first event of its answer."""

import secrets
import time
from collections.abc import Sequence

from gateway.admission.pipeline import AdmittedRequest
from gateway.admission.prompts import PreparedPrompt
from gateway.streaming.assembler import Assembler
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.transcript import Transcript
from gateway.validation.requests import ValidRequest
from sluice.defaults import HIDDEN_TOKEN_ID
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


def new_attempt(
    request: ValidRequest,
    prepared: PreparedPrompt,
    row_id: str,
    held: Sequence[int],
    stall_s: float,
    now: float,
) -> ModelAttempt:
    """A model's attempt at the answer; ``held`` are the tokens that the caller was shown before."""
    tokenizer = prepared.model.tokenizer
    inspection = None if prepared.inspect is None else prepared.inspect()
    transcript = Transcript(
        tokenizer.detokenizer(),
        tuple(request.sampling.stop),
        tokenizer.stop_token_ids,
        tokenizer.token_text,
        None if inspection is None else inspection.filter,
        held,
        request.sampling.logprobs,
    )
    for token_id in _before_hidden(held):
        if not transcript.closed:  # the held tokens may contain a stop string
            transcript.append(token_id)
    assembler = Assembler(len(transcript.token_ids), stall_s, now)
    prompt_tokens = len(prepared.prompt_token_ids)
    return ModelAttempt(
        row_id, prepared.model.name, prompt_tokens, transcript, assembler, inspection
    )


def task_of(
    attempt: ModelAttempt,
    request: ValidRequest,
    prepared: PreparedPrompt,
    gateway_id: str,
    deadline: float,
) -> Task:
    """The task of ``attempt``'s row; ``deadline`` in monotonic seconds."""
    remaining_ms = (deadline - time.monotonic()) * 1000
    return Task(
        request_id=attempt.row_id,
        gateway=gateway_id,
        model=prepared.model.name,
        tenant=request.tenant,
        priority_class=request.priority_class,
        deadline_unix_ms=unix_ms() + int(remaining_ms),
        published_unix_ms=unix_ms(),
        prompt_token_ids=prepared.prompt_token_ids,
        produced_token_ids=attempt.transcript.token_ids,
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


def already_complete(sampling: Sampling, transcript: Transcript) -> "FinishReason.ValueType | None":
    """Why nothing is left to compute after the held tokens, or None. `Stream.finish` finds stop strings itself."""
    held = transcript.token_ids
    if transcript.closed or (held and held[-1] in sampling.stop_token_ids):
        return FINISH_REASON_STOP
    if len(held) >= sampling.max_tokens:
        return FINISH_REASON_LENGTH
    return None


def _before_hidden(held: Sequence[int]) -> Sequence[int]:
    """The tokens before the first that was hidden from the caller; from there on the answer is computed again."""
    hidden = held.index(HIDDEN_TOKEN_ID) if HIDDEN_TOKEN_ID in held else len(held)
    return held[:hidden]
