"""Trains a router from outcomes. Pure code; the same outcomes and seed give the same router.

The prompt head is a pair of logistic regressions on hashed words of the prompt, the cascade head on
columns of the answer. Each head is fitted once more in folds: the held-out predictions give the
calibration and the thresholds.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack

from gateway.routing.learned import answer
from gateway.routing.learned.features import HASHED, buckets
from gateway.routing.learned.model import (
    CLIP,
    Calibration,
    Columns,
    Head,
    LearnedRouter,
    Vector,
    Words,
    damp,
)
from learning.outcomes import ROWS_MIN, OneSided, RouterOutcome, TooFewOutcomes

Matrix = NDArray[np.float64]

FOLDS: Final = 5
"""Folds of the held-out predictions."""
C_WORDS: Final = 1.0
"""Inverse regularisation strength of the prompt head."""
C_COLUMNS: Final = 0.01
"""Inverse regularisation strength of the cascade head."""

SLOPE_MIN: Final = 0.05
"""Least slope of a calibration: a raw gain that predicts nothing still keeps its order."""
SLOPE_MAX: Final = 3.0
"""Highest slope of a calibration."""

ONE_SIDED_WEIGHT: Final = 0.3
"""Weight of a row with one side, beside 1 for a row with both."""
ONE_SIDED_SHARE_MAX: Final = 2.0
"""Most weight of all rows with one side, as a multiple of the weight of the others."""

Examples = Sequence[NDArray[Any]]
"""For each row the buckets of its prompt, or the columns of its answer."""


def train(
    outcomes: Sequence[RouterOutcome], seed: int = 0, one_sided: Sequence[OneSided] = ()
) -> LearnedRouter:
    """Train a router; it has a head for cascades if every outcome has the small model's answer.

    A first router predicts the missing side of the `one_sided` rows. Then these train the final one
    too, with less weight. Calibration comes from `outcomes` alone.

    Raises:
        TooFewOutcomes: there are fewer than `ROWS_MIN` outcomes.
    """
    if len(outcomes) < ROWS_MIN:
        raise TooFewOutcomes(f"{len(outcomes)} outcomes, at least {ROWS_MIN} are needed")
    router = _fit(outcomes, (), seed)
    return _fit(outcomes, fill_missing(router, outcomes, one_sided), seed) if one_sided else router


def fill_missing(
    router: LearnedRouter, outcomes: Sequence[RouterOutcome], one_sided: Sequence[OneSided]
) -> list[RouterOutcome]:
    """Return `one_sided` rows with the missing side predicted, and with less weight."""
    total = len(one_sided) * ONE_SIDED_WEIGHT
    most = sum(outcome.weight for outcome in outcomes) * ONE_SIDED_SHARE_MAX
    weight = ONE_SIDED_WEIGHT * min(1.0, most / total) if total else 0.0
    filled = []
    for row in one_sided:
        predicted = router.prompts.score(row.prompt)
        weak = predicted.p_weak if row.weak is None else row.weak
        strong = predicted.p_strong if row.strong is None else row.strong
        filled.append(RouterOutcome("", row.prompt, weak, strong, row.answer, weight))
    return filled


def _fit(
    outcomes: Sequence[RouterOutcome], filled: Sequence[RouterOutcome], seed: int
) -> LearnedRouter:
    rows = [*outcomes, *filled]
    prompts = _fit_head(fit_words, [buckets(row.prompt) for row in rows], rows, len(outcomes), seed)
    # The cascade head judges answers, and some are missing.
    if any(outcome.answer is None for outcome in outcomes):
        return LearnedRouter(prompts, None)
    answered = [row for row in rows if row.answer is not None]
    answers = [answer.columns(row.prompt, row.answer or "") for row in answered]
    return LearnedRouter(prompts, _fit_head(fit_columns, answers, answered, len(outcomes), seed))


def _fit_head(
    fit: Callable[[Examples, Matrix, Matrix], Words | Columns],
    examples: Examples,
    rows: Sequence[RouterOutcome],
    measured: int,
    seed: int,
) -> Head:
    """Fit a head to `rows`, of which the first `measured` calibrate it."""
    labels = np.array([(row.weak, row.strong) for row in rows], np.float64)
    weights = np.array([row.weight for row in rows], np.float64)
    # Scale, so that the regularisation does not depend on the number of one-sided rows.
    weights = weights / weights[:measured].mean()
    held_out = np.zeros_like(labels)
    order = np.random.default_rng(seed).permutation(len(rows))
    for fold in range(FOLDS):
        test_rows = order[fold::FOLDS]
        train_rows = np.sort(np.delete(order, np.s_[fold::FOLDS]))
        part = fit([examples[row] for row in train_rows], labels[train_rows], weights[train_rows])
        held_out[test_rows] = [part.predict(examples[row]) for row in test_rows]
    calibration = calibrate(held_out[:measured], labels[:measured], weights[:measured])
    return Head(fit(examples, labels, weights), calibration)


def fit_words(examples: Examples, labels: Matrix, weights: Matrix) -> Words:
    """Fit regressions on `features.buckets`; `labels` are [rows, 2], `weights` [rows]."""
    words = np.concatenate(examples)
    rows = np.repeat(np.arange(len(examples)), [len(example) for example in examples])
    counts = np.bincount(words, minlength=HASHED)
    rarity = np.where(counts < 2, 0.0, np.log((1 + len(examples)) / (1 + counts)) + 1)
    norms = np.sqrt(np.bincount(rows, rarity[words] ** 2, minlength=len(examples)))
    values = rarity[words] / np.maximum(norms, 1e-6)[rows]
    matrix = csr_matrix((values, (rows, words)), shape=(len(examples), HASHED))
    return Words(rarity.astype(np.float32), *_regressions(matrix, labels, weights, C_WORDS))


def fit_columns(examples: Examples, labels: Matrix, weights: Matrix) -> Columns:
    """Fit regressions on `answer.columns`; `labels` are [rows, 2], `weights` [rows]."""
    columns = damp(np.array(examples)).astype(np.float64)
    mean, scale = columns.mean(axis=0), columns.std(axis=0) + 1e-3
    scaled = np.clip((columns - mean) / scale, -CLIP, CLIP)
    fitted = _regressions(csr_matrix(scaled), labels, weights, C_COLUMNS)
    return Columns(mean.astype(np.float32), scale.astype(np.float32), *fitted)


def _regressions(
    matrix: csr_matrix, labels: Matrix, weights: Matrix, strength: float
) -> tuple[Vector, Vector]:
    """Return coefficients [columns, 2] and intercepts [2].

    A label of 0.7 counts as 0.7 of a right and 0.3 of a wrong row.
    """
    # Imported here: whoever only reads routers need not wait for scikit-learn.
    from sklearn.linear_model import LogisticRegression

    twice = vstack([matrix, matrix], format="csr")
    targets = np.repeat((1, 0), len(labels))
    coefficients, intercepts = [], []
    for label in labels.T:
        model = LogisticRegression(C=strength, max_iter=500)
        # A model that is always right: without any weight a class would be missing.
        counted = np.concatenate((weights * label, weights * (1 - label))) + 1e-6
        model.fit(twice, targets, sample_weight=counted)
        coefficients.append(model.coef_[0])
        intercepts.append(model.intercept_[0])
    return np.array(coefficients, np.float32).T.copy(), np.array(intercepts, np.float32)


def calibrate(raw: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any]) -> Calibration:
    """Fit calibration lines to held-out predictions.

    Args:
        raw: [rows, 2], predicted P(weak right), P(strong right).
        labels: [rows, 2], the outcomes of both.
        weights: [rows].
    """
    gains, weak, strong = raw[:, 1] - raw[:, 0], labels[:, 0], labels[:, 1]
    lines = np.array([_line(gains, strong - weak, weights), _line(raw[:, 0], weak, weights)])
    calibrated = np.clip(lines[0, 0] * gains + lines[0, 1], -1, 1)
    return Calibration(lines, *(column.astype(np.float32) for column in (calibrated, weak, strong)))


def _line(x: NDArray[Any], y: NDArray[Any], weights: NDArray[Any]) -> tuple[float, float]:
    """Return slope and intercept."""
    spread = np.cov(x, y, aweights=weights)
    slope = float(np.clip(spread[0, 1] / max(spread[0, 0], 1e-9), SLOPE_MIN, SLOPE_MAX))
    return slope, float(np.average(y - slope * x, weights=weights))
