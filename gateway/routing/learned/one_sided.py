"""Rows of which it is known how good one model was, and not the other: most of what traffic teaches, for a grade is of
the answer that somebody got.

Both chances are learned from rows that have both; what is missing of the others is predicted, and then all of them
teach, the filled-in ones with less weight. Those count neither for the calibration nor for the figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.routing.learned import training
from gateway.routing.learned.outcomes import Outcome
from gateway.routing.learned.router import LearnedRouter

WEIGHT: Final = 0.3
"""Of a filled-in row beside one that has both sides; half of its gain is what the rows with both have said already."""
SHARE_MAX: Final = 2.0
"""Filled-in rows together weigh at most so many times as much as the others."""


@dataclass(frozen=True, slots=True)
class OneSided:
    """How one of the two models did on one prompt; the other side is None."""

    prompt_id: str
    prompt: str
    weak: float | None
    strong: float | None
    answer: str | None = None
    """What the small model wrote."""
    weight: float = 1.0


def train(outcomes: Sequence[Outcome], rows: Sequence[OneSided], seed: int = 0) -> LearnedRouter:
    """As `training.train`, from ``rows`` as well.

    Raises:
        TooFewOutcomes: too few rows have both sides.
    """
    first = training.train(outcomes, seed)
    if not rows:
        return first
    return training.train([*outcomes, *fill(first, outcomes, rows)], seed)


def fill(
    router: LearnedRouter, outcomes: Sequence[Outcome], rows: Sequence[OneSided]
) -> list[Outcome]:
    """``rows`` with what ``router``, learned from ``outcomes``, says about their other side."""
    total = sum(row.weight for row in rows) * WEIGHT
    most = sum(outcome.weight for outcome in outcomes) * SHARE_MAX
    scale = WEIGHT * min(1.0, most / total) if total > 0 else 0.0
    return [_filled(router, row, row.weight * scale) for row in rows]


def _filled(router: LearnedRouter, row: OneSided, weight: float) -> Outcome:
    said = router.score(row.prompt)
    weak = said.p_weak if row.weak is None else row.weak
    strong = said.p_strong if row.strong is None else row.strong
    return Outcome(row.prompt_id, row.prompt, weak, strong, row.answer, weight, assumed=True)
