"""Compute the labels of an outcome: how good the answers of a weak and a strong model to one request were.

Routers are trained on these labels.
"""

from typing import NamedTuple

from sluice.internal.v1.outcome_pb2 import Outcome
from sluice.v1 import admin_pb2 as pb
from sluice.wire.clock import timestamp


class Label(NamedTuple):
    """The quality of an answer, from 0 to 1, and where it comes from."""

    quality: float
    source: "pb.OutcomeSource.ValueType"


def response_of(outcome: Outcome, grade: float | None) -> pb.StreamOutcomesResponse | None:
    """Return an outcome with its labels; None if neither label is known."""
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
    """Return the labels of the weak and of the strong model; None if unknown.

    Args:
        strong_answered: Whether the caller got the strong model's answer.
        compared: How far the two answers agree, and where the second one comes from.
        grade: Grade of the caller's answer, from 0 to 1.

    | compared | graded | answered by | weak | strong |
    |---|---|---|---|---|
    | no | no | either | - | - |
    | no | g | weak | g | - |
    | no | g | strong | - | g |
    | agreement a | no | either | a | 1 |
    | agreement a | g | strong | a g | g |
    | agreement a | g | weak | g | 1 - a (1 - g) |

    Without a grade, the strong model's answer is the reference. A grade holds for both answers as far as they agree. As
    far as they do not, an ungraded weak answer counts as wrong, and an ungraded strong answer as right.
    """
    graded = None if grade is None else Label(grade, pb.OUTCOME_SOURCE_GRADE)
    if compared is None:
        return (None, graded) if strong_answered else (graded, None)
    agreed, source = compared
    # Rows 4 and 5 of the table above if the strong model answered, else 4 and 6.
    if strong_answered:
        strong = graded or Label(1.0, source)
        return Label(agreed * strong.quality, source), strong
    if graded is None:
        return compared, Label(1.0, source)
    return graded, Label(1 - agreed * (1 - graded.quality), source)
