"""What is kept of a request to learn from, filled in as it becomes known. Plain code over the message that is kept."""

from collections.abc import Mapping
from typing import Final

from gateway.records.agreement import agreement
from gateway.records.labels import Compared, Label, Source, label
from gateway.routing.learned.text import ends
from gateway.routing.plan import Learning
from gateway.safety.actions import Action
from gateway.streaming.leg import Leg
from gateway.streaming.stream import Stream
from gateway.validation.requests import ValidRequest
from sluice.internal.v1.outcome_pb2 import Comparison, Outcome
from sluice.v1.admin_pb2 import (
    OUTCOME_SOURCE_CASCADE,
    OUTCOME_SOURCE_GRADE,
    OUTCOME_SOURCE_SHADOW,
    OUTCOME_SOURCE_UNSPECIFIED,
    ListOutcomesResponse,
    OutcomeSource,
)
from sluice.v1.inference_pb2 import FINISH_REASON_CONTENT_FILTER
from sluice.wire.clock import timestamp, unix_ms

TEXT_CHARS_MAX: Final = 16_384
"""Of a prompt, and of an answer; of a longer one its two ends are kept, as the learned router reads it."""

_STEERING: Final = (Action.ROUTE, Action.BLOCK)
_SOURCES: Final[Mapping[Source, "OutcomeSource.ValueType"]] = {
    Source.GRADE: OUTCOME_SOURCE_GRADE,
    Source.CASCADE: OUTCOME_SOURCE_CASCADE,
    Source.SHADOW: OUTCOME_SOURCE_SHADOW,
}


def teaches(request: ValidRequest, stream: Stream) -> bool:
    """Whether something may be learned from an answer that has ended: it is complete, and no guard steered it.

    A resumed answer was begun elsewhere, and its request is counted there.
    """
    finished, guards = stream.finished, stream.ticket.guards
    if finished is None or request.resume or blocked(stream):
        return False
    return guards is None or all(one.action not in _STEERING for one in guards.checks.decided)


def blocked(stream: Stream) -> bool:
    """Whether the safety policy ended the answer."""
    finished = stream.finished
    return finished is not None and finished.reason == FINISH_REASON_CONTENT_FILTER


def outcome_of(
    request: ValidRequest, prompt: str, learning: Learning, stream: Stream
) -> Outcome | None:
    """What an answer that `teaches` teaches; None where nothing of it may be kept, or nothing is compared.

    ``prompt``: the caller's turns as the models saw them.
    """
    if not learning.kept or learning.pair is None or stream.leg.model not in learning.pair:
        return None
    weak, strong = learning.pair
    outcome = Outcome(
        request_id=stream.request_id,
        tenant=request.tenant,
        workload=request.workload,
        answered_unix_ms=unix_ms(),
        policy=learning.policy,
        weak_model=weak,
        strong_model=strong,
        strong_answered=stream.leg.model == strong,
        prompt=ends(prompt, TEXT_CHARS_MAX),
    )
    if outcome.strong_answered:
        _compare_draft(outcome, stream)
    else:
        _keep_answer(outcome, stream.leg)
    return outcome


def add_shadow(outcome: Outcome, shadow: Leg, agreed: float) -> bool:
    """The model of ``shadow`` was asked as well; False where it is not the other one of the two."""
    if shadow.model != (outcome.weak_model if outcome.strong_answered else outcome.strong_model):
        return False
    outcome.comparison.CopyFrom(Comparison(agreement=agreed, shadow=True))
    if outcome.strong_answered:
        _keep_answer(outcome, shadow)
    return True


def response_of(outcome: Outcome, grade: float | None) -> ListOutcomesResponse | None:
    """An outcome with its labels; None where nothing is known of either model."""
    compared = None
    if outcome.HasField("comparison"):
        source = Source.SHADOW if outcome.comparison.shadow else Source.CASCADE
        compared = Compared(outcome.comparison.agreement, source)
    labels = label(outcome.strong_answered, compared, grade)
    if labels.weak is None and labels.strong is None:
        return None
    return ListOutcomesResponse(
        request_id=outcome.request_id,
        tenant=outcome.tenant,
        workload=outcome.workload,
        answer_time=timestamp(outcome.answered_unix_ms),
        policy=outcome.policy,
        weak_model=outcome.weak_model,
        strong_model=outcome.strong_model,
        prompt=outcome.prompt,
        weak_answer=outcome.weak_answer if outcome.HasField("weak_answer") else None,
        weak=_quality(labels.weak),
        strong=_quality(labels.strong),
        weak_source=_source(labels.weak),
        strong_source=_source(labels.strong),
    )


def _compare_draft(outcome: Outcome, stream: Stream) -> None:
    """The weak model's draft, where a cascade went over from it; one that was cut off is worth nothing."""
    others = (leg for leg in stream.legs if leg is not stream.leg)
    draft = next((leg for leg in others if leg.model == outcome.weak_model), None)
    if draft is None or draft.error is not None:  # what broke tells nothing of the model
        return
    complete = draft.transcript.closed
    agreed = agreement(draft.said, stream.leg.said) if complete else 0.0
    outcome.comparison.CopyFrom(Comparison(agreement=agreed))
    if complete:
        _keep_answer(outcome, draft)


def _keep_answer(outcome: Outcome, leg: Leg) -> None:
    """Of an answer in which the safety policy found something nothing is kept."""
    output = None if leg.answer is None else leg.answer.filter
    if output is None or not (output.review().taken or output.echoes):
        outcome.weak_answer = ends(leg.said, TEXT_CHARS_MAX)


def _quality(known: Label | None) -> float | None:
    return None if known is None else known.quality


def _source(known: Label | None) -> "OutcomeSource.ValueType":
    return OUTCOME_SOURCE_UNSPECIFIED if known is None else _SOURCES[known.source]
