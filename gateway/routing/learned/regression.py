"""Regressions that lean on what is known beforehand: the direction in which a column points.

With 300 outcomes and 250 columns plain shrinkage towards zero loses most of what is there. So a hand-written direction,
"an answer whose sums do not add up is less likely right", is one column of its own that is hardly shrunk; the others
only correct it.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned import answer, features
from gateway.routing.learned.linear import CLIP, Linear, damp

Matrix = NDArray[np.float64]

SHRINK: Final = 100.0
"""Of a column; in rows."""
SHRINK_DIRECTION: Final = 0.1
_STEPS: Final = 25
_SETTLED: Final = 1e-6

HARDER: Final[Mapping[str, float]] = {
    "quantities": 0.5, "chars log": 0.5, "sentences": 0.25, "distinct numbers": 0.15, "decimals": 0.1,
    "relation share": 0.1, "class subtracts": 0.15, "class divides": 0.15, "class asks back": 0.15,
    "answer any wrong": 2, "answer unfinished": 2, "answer fraction": 2, "answer missing": 1,
    "answer unmentioned share": 1, "answer unused share": 1, "answer missing sums": 1, "answer last sum": -1,
    "answer foreign operands": 0.7, "answer unused results": 0.7, "answer any fraction": 0.5,
    "answer fraction of how many": 0.5, "answer marked": -0.5, "answer negative": 0.5, "answer negatives": 0.5,
    "answer percent unused": 0.5, "answer chars log": 0.5, "answer in prompt": 0.5, "answer earlier sum": 0.5,
    "answer zero": 0.5, "answer says however": 0.5, "answer missing operations": 0.5, "answer spelled unused": 0.5,
    "answer asks back": 0.5, "answer says unclear": 0.3, "answer says assum": 0.3, "answer says approximately": 0.3,
    "answer says not enough": 0.3, "answer unread sums": 0.3, "answer unknowns": 0.3, "answer repeated lines": 0.3,
}  # fmt: skip
"""What makes a right answer less likely, and how much, in scaled columns; written from what the columns mean."""


def columns(with_answer: bool) -> tuple[str, ...]:
    """Names of the columns of a head."""
    return (*features.NAMES, *answer.NAMES) if with_answer else features.NAMES


def fit(rows: NDArray[np.float32], labels: Matrix, weights: Matrix, names: Sequence[str]) -> Linear:
    """Regressions of ``labels`` [rows, outputs] on ``rows`` [rows, columns], each row counting ``weights`` times."""
    damped = damp(rows).astype(np.float64)
    mean, scale = damped.mean(axis=0), damped.std(axis=0) + 1e-3
    scaled = np.clip((damped - mean) / scale, -CLIP, CLIP)
    harder = np.array([HARDER.get(name, 0.0) for name in names])
    fitted = [_fit(scaled, labels[:, output], weights, harder) for output in range(labels.shape[1])]
    return Linear(
        mean.astype(np.float32),
        scale.astype(np.float32),
        np.column_stack([coefficients for coefficients, _ in fitted]).astype(np.float32),
        np.array([intercept for _, intercept in fitted], np.float32),
    )


def predict(linear: Linear, rows: NDArray[np.float32]) -> Matrix:
    """[rows, outputs]: what ``linear`` says."""
    return np.array([linear.predict(row) for row in rows], np.float64)


def _fit(scaled: Matrix, labels: Matrix, weights: Matrix, harder: Matrix) -> tuple[Matrix, float]:
    """Coefficients and intercept, by Newton's method with halved steps."""
    design = np.column_stack((np.ones(len(scaled)), scaled @ harder, scaled))
    shrink = np.concatenate(([1e-3, SHRINK_DIRECTION], np.full(scaled.shape[1], SHRINK)))
    state = np.zeros(design.shape[1])
    loss = _loss(design, labels, weights, shrink, state)
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-design @ state))
        slope = design.T @ (weights * (chance - labels)) + shrink * state
        curvature = (design.T * (weights * chance * (1 - chance))) @ design + np.diag(shrink)
        step = np.linalg.solve(curvature, slope)
        size = 1.0
        while (
            new := _loss(design, labels, weights, shrink, state - size * step)
        ) > loss and size > 1e-3:
            size /= 2
        state, improved, loss = state - size * step, loss - new, new
        if improved < _SETTLED * (1 + abs(loss)):
            break
    return state[1] * harder + state[2:], float(state[0])


def _loss(design: Matrix, labels: Matrix, weights: Matrix, shrink: Matrix, state: Matrix) -> float:
    odds = design @ state
    return float(
        weights @ (np.logaddexp(0, odds) - labels * odds) + (shrink * state * state).sum() / 2
    )
