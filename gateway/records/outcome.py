"""Outcomes: how good the answers of a weak and a strong model to one request were, from comparisons and grades.

Routers are trained on them. Pure code over the message that is stored.
"""

from typing import Final, NamedTuple

from gateway.records.agreement import agreement
from gateway.routing.learned.features import ends
from gateway.routing.plan import Learning
from gateway.safety.actions import Action
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.streaming.row_result import RowResult
from gateway.validation.requests import ValidRequest
from sluice.internal.v1.outcome_pb2 import Comparison, Outcome
from sluice.v1 import admin_pb2 as pb
from sluice.v1.inference_pb2 import FINISH_REASON_CONTENT_FILTER
from sluice.wire.clock import timestamp, unix_ms

TEXT_CHARS_MAX: Final = 16_384
"""Of a prompt or an answer; of a longer text both ends are kept, as the learned router reads it."""

_STEERING: Final = (Action.ROUTE, Action.BLOCK)


class Label(NamedTuple):
    """How good an answer was, 0 to 1, and how that is known."""

    quality: float
    source: "pb.OutcomeSource.ValueType"


def learnable(request: ValidRequest, stream: Answer) -> bool:
    """Whether an answer that has ended may be used for learning: it is complete, and no guard blocked or rerouted it.

    A resumed answer began in another stream, which counts.
    """
    finished, guards = stream.finished, stream.guards
    if finished is None or request.resume or blocked(stream):
        return False
    return guards is None or all(one.action not in _STEERING for one in guards.checks.decided)


def blocked(result: RowResult) -> bool:
    """Whether the safety policy ended the answer."""
    return result.reason == FINISH_REASON_CONTENT_FILTER


def outcome_of(
    request: ValidRequest, prompt: str, learning: Learning, stream: Answer
) -> Outcome | None:
    """The outcome of a `learnable` answer; None where it may not be kept, or no two models are compared.

    ``prompt``: the caller's turns as the models saw them.
    """
    if not learning.kept or learning.pair is None or stream.current.model not in learning.pair:
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
        strong_answered=stream.current.model == strong,
        prompt=ends(prompt, TEXT_CHARS_MAX),
    )
    if outcome.strong_answered:
        _compare_draft(outcome, stream)
    else:
        _keep_answer(outcome, stream.current)
    return outcome


def add_shadow(outcome: Outcome, shadow: Row, agreed: float) -> bool:
    """Adds the answer of a shadow; False where its model is not the other one of the two."""
    if shadow.model != (outcome.weak_model if outcome.strong_answered else outcome.strong_model):
        return False
    outcome.comparison.CopyFrom(Comparison(agreement=agreed, shadow=True))
    if outcome.strong_answered:
        _keep_answer(outcome, shadow)
    return True


def response_of(outcome: Outcome, grade: float | None) -> pb.StreamOutcomesResponse | None:
    """An outcome with its labels; None where neither model's label is known."""
    compared = None
    if outcome.HasField("comparison"):
        source = (
            pb.OUTCOME_SOURCE_SHADOW if outcome.comparison.shadow else pb.OUTCOME_SOURCE_CASCADE
        )
        compared = Label(outcome.comparison.agreement, source)
    weak, strong = labels(outcome.strong_answered, compared, grade)
    if weak is None and strong is None:
        return None
    response = pb.StreamOutcomesResponse(
        request_id=outcome.request_id,
        tenant=outcome.tenant,
        workload=outcome.workload,
        answer_time=timestamp(outcome.answered_unix_ms),
        policy=outcome.policy,
        weak_model=outcome.weak_model,
        strong_model=outcome.strong_model,
        prompt=outcome.prompt,
        weak_answer=outcome.weak_answer if outcome.HasField("weak_answer") else None,
    )
    if weak is not None:
        response.weak, response.weak_source = weak
    if strong is not None:
        response.strong, response.strong_source = strong
    return response


def labels(
    strong_answered: bool, compared: Label | None, grade: float | None
) -> tuple[Label | None, Label | None]:
    """The labels of the weak and of the strong model; None: not known.

    Args:
        strong_answered: which model's answer the caller got; the ``grade``, 0 to 1, is of that.
        compared: how far the two answers agree, and what the second one came from.

    | compared | graded | answered by | weak | strong |
    |---|---|---|---|---|
    | no | no | either | - | - |
    | no | g | weak | g | - |
    | no | g | strong | - | g |
    | agreement a | no | either | a | 1 |
    | agreement a | g | strong | a g | g |
    | agreement a | g | weak | g | 1 - a (1 - g) |

    Without a grade the strong model's answer is the reference. With one, both get it where they agree; where they do
    not, a weak answer is as far from right as from the strong one, and a strong answer stays the reference.
    """
    graded = None if grade is None else Label(grade, pb.OUTCOME_SOURCE_GRADE)
    if compared is None:
        return (None, graded) if strong_answered else (graded, None)
    agreed, source = compared
    if strong_answered:
        strong = graded or Label(1.0, source)
        return Label(agreed * strong.quality, source), strong
    if graded is None:
        return compared, Label(1.0, source)
    return graded, Label(1 - agreed * (1 - graded.quality), source)


def _compare_draft(outcome: Outcome, stream: Answer) -> None:
    """Compares the draft of the weak model with the answer of a cascade that escalated; a cut-off draft scores 0."""
    others = (one for one in stream.attempts if one is not stream.current)
    draft = next((one for one in others if one.model == outcome.weak_model), None)
    if draft is None:
        return
    complete = draft.transcript.closed
    agreed = agreement(draft.raw_text, stream.current.raw_text) if complete else 0.0
    outcome.comparison.CopyFrom(Comparison(agreement=agreed))
    if complete:
        _keep_answer(outcome, draft)


def _keep_answer(outcome: Outcome, attempt: Row) -> None:
    """Keeps an answer unless the safety policy found something in it."""
    output = None if attempt.inspection is None else attempt.inspection.filter
    if output is None or not (output.review().taken or output.echoes):
        outcome.weak_answer = ends(attempt.raw_text, TEXT_CHARS_MAX)
