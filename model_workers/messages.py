"""Conversion between the wire's messages and the engine's types.

A task becomes a valid `SequenceSpec` or is refused here; engines check only what depends on the model and their state.
"""

import math
from typing import Final

from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
    SequenceSpec,
    SequenceStep,
    TokenLogprobs,
    describe,
    is_retryable,
)
from sluice.errors import InvalidRequest, SluiceError
from sluice.internal.v1 import frame_pb2, task_pb2, worker_pb2
from sluice.wire.subjects import CLASSES, RANKS

_BOUNDS: Final = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "top_logprobs": (0, 32),
}
"""Smallest and largest value of fields of the wire's `Sampling`, each a finite number."""
_SAME: Final = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", *list(_BOUNDS)[:-1])
"""Fields of `Sampling` that are copied unchanged."""


def sequence_spec(
    sequence: worker_pb2.BatchedTask, owner: str, now: float, batch: str = "", traceparent: str = ""
) -> SequenceSpec:
    """Return the sequence of a task that arrives at `now`, in monotonic seconds.

    Raises:
        InvalidRequest: A field has a value that cannot be computed with.
    """
    task, scored = sequence.task, sequence.task.values.scored_token_ids
    _require(bool(task.request_id), "request_id is empty")
    _require(bool(task.prompt_token_ids), "the prompt has no tokens")
    _require(
        len(scored) <= len(task.prompt_token_ids),
        "more tokens are to be scored than the prompt has",
    )
    return SequenceSpec(
        request_id=task.request_id,
        owner=owner,
        attempt=sequence.attempt,
        prompt=tuple(task.prompt_token_ids),
        produced=tuple(task.produced_token_ids),
        sampling=_sampling(task.sampling),
        deadline=now + sequence.timeout_ms / 1000 if sequence.timeout_ms else None,
        rank=_rank(task.priority_class),
        coalesce_s=task.coalesce_ms / 1000,
        values=_values(task.values) if task.HasField("values") else None,
        audio=_audio(task.audio) if task.HasField("audio") else None,
        tenant=task.tenant,
        last_try=task.last_try,
        batch=batch,
        traceparent=traceparent,
    )


def _values(values: task_pb2.Values) -> task_pb2.Values:
    most = int(_BOUNDS["top_logprobs"][1])
    values.scored_alternatives = min(values.scored_alternatives, most)
    return values


def _audio(audio: task_pb2.Audio) -> task_pb2.Audio:
    _require(bool(audio.pcm), "audio.pcm is empty")
    _require(len(audio.pcm) % 2 == 0, "audio.pcm has half a sample")
    return audio


def _rank(priority_class: str) -> int:
    _require(priority_class in CLASSES, f"priority_class must be one of {', '.join(CLASSES)}")
    return RANKS[priority_class]


def _sampling(sampling: task_pb2.Sampling) -> Sampling:
    _require(sampling.max_tokens >= 1, "max_tokens must be at least 1")
    for name, (low, high) in _BOUNDS.items():
        _require(_within(getattr(sampling, name), low, high), f"{name} must be in [{low}, {high}]")
    _require(sampling.top_p > 0, "top_p must be above 0")
    biases = sampling.logit_bias.values()
    _require(all(_within(bias, -100, 100) for bias in biases), "logit_bias must be in [-100, 100]")
    constraint = sampling.WhichOneof("constraint")
    _require(sampling.min_tokens <= sampling.max_tokens, "min_tokens must be at most max_tokens")
    # A complete answer that must not end yet has no next token.
    _require(not (constraint and sampling.min_tokens), "min_tokens cannot go with a constraint")
    _require(
        bool(sampling.stop_token_ids) or not constraint, "a constraint needs stop_token_ids to end"
    )
    return Sampling(
        **{name: getattr(sampling, name) for name in _SAME},
        **({constraint: getattr(sampling, constraint)} if constraint else {}),
        top_logprobs=sampling.top_logprobs if sampling.logprobs else 0,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        logit_bias=tuple(sampling.logit_bias.items()),
        server=sampling.server if sampling.HasField("server") else None,
    )


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)


def frame(step: SequenceStep) -> frame_pb2.Frame:
    """Return a frame with the tokens of a step."""
    message = frame_pb2.Frame(
        request_id=step.request_id, attempt=step.attempt, start_index=step.start_index
    )
    extend(message, step)
    return message


def extend(message: frame_pb2.Frame, step: SequenceStep) -> None:
    """Append the tokens of the sequence's next step to a frame."""
    message.token_ids.extend(step.token_ids)
    if step.logprobs:
        message.logprobs.extend(map(_logprobs, step.logprobs))


def final(step: SequenceStep, timings: frame_pb2.TaskTimings | None = None) -> frame_pb2.Final:
    """Return the end of a sequence whose last step is `step`."""
    assert step.end is not None
    message = frame_pb2.Final(
        end=frame_pb2.TaskEnd.ValueType(step.end),
        timings=timings or frame_pb2.TaskTimings(),
        cached_prompt_tokens=step.cached_prompt_tokens,
        values=step.values,
    )
    if step.server_tokens is not None:
        prompt_tokens, completion_tokens = step.server_tokens
        message.server_tokens.prompt_tokens = prompt_tokens
        message.server_tokens.completion_tokens = completion_tokens
    if step.end in (SequenceEnd.FAILED, SequenceEnd.RETURNED):
        message.error.reason = step.reason
        message.error.retry_after_s = step.retry_after_s
        message.error.message = step.error
        message.error.field = step.field
    return message


def refusal(request_id: str, error: SluiceError) -> worker_pb2.Refusal:
    """Return why a task was refused."""
    message, field = describe(error)
    return worker_pb2.Refusal(
        request_id=request_id,
        error=frame_pb2.TaskError(reason=error.reason, message=message, field=field),
        retryable=is_retryable(error),
    )


def _logprobs(entry: TokenLogprobs) -> frame_pb2.Logprobs:
    return frame_pb2.Logprobs(
        logprob=entry.logprob,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_texts=[text for text, _ in entry.top_texts],
        top_logprobs=[logprob for _, logprob in entry.top or entry.top_texts],
        text=entry.text,
    )
