"""From outcomes to a router. Pure code; the same outcomes and seed give the same router.

Three parts learn side by side: regressions, a forest, grams. Everything once more in folds gives the held-out
predictions for the blend, the calibration and the thresholds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned import (
    answer,
    blending,
    calibration,
    features,
    grams,
    growing,
    prior,
    regression,
)
from gateway.routing.learned.forest import Forest
from gateway.routing.learned.grams import Vocabulary
from gateway.routing.learned.head import Blend, Head, widen
from gateway.routing.learned.linear import Linear
from gateway.routing.learned.outcomes import ROWS_MIN, Outcome, TooFewOutcomes
from gateway.routing.learned.router import LearnedRouter
from gateway.routing.learned.text import Text, parse

Matrix = NDArray[np.float64]

FOLDS: Final = 5
GRAM_SHRINK: Final = 0.5


@dataclass(frozen=True)
class _Data:
    """Outcomes as arrays; one entry a row."""

    texts: Sequence[Text]
    columns: NDArray[np.float32]
    labels: Matrix
    """[rows, 2]: weak, strong."""
    weights: Matrix
    measured: NDArray[np.bool_]
    """Whether both labels are."""
    names: Sequence[str]
    vocabulary: Vocabulary
    prior: NDArray[np.float32]
    """[rows, outputs]: what the prior says."""
    kernel: Matrix
    """[rows, rows]: how many grams two rows share, weighted."""

    def only(self, rows: NDArray[np.int64]) -> "_Data":
        """Some of the rows; the vocabulary stays, it knows no outcomes."""
        return _Data(
            [self.texts[row] for row in rows],
            self.columns[rows],
            self.labels[rows],
            self.weights[rows],
            self.measured[rows],
            self.names,
            self.vocabulary,
            self.prior[rows],
            self.kernel[np.ix_(rows, rows)],
        )


@dataclass(frozen=True)
class _Parts:
    linear: Linear
    gram_weights: Matrix
    """[rows, 2]: of each row learned from."""
    gram_base: Matrix
    forest: Forest


def train(outcomes: Sequence[Outcome], seed: int = 0) -> LearnedRouter:
    """Learns a router; with a head for cascades where every outcome has the small model's answer.

    Raises:
        TooFewOutcomes: see `outcomes.gather`.
    """
    if len(outcomes) < ROWS_MIN:
        raise TooFewOutcomes(f"{len(outcomes)} outcomes, at least {ROWS_MIN} are needed")
    texts = [parse(outcome.prompt) for outcome in outcomes]
    rows = np.array([features.describe(text) for text in texts])
    vocabulary = grams.learn(texts)
    other = prior.load()
    known = np.array([other.predict(row) for row in rows])
    kernel = _kernel(vocabulary, texts)
    labels = np.array([(outcome.weak, outcome.strong) for outcome in outcomes], np.float64)
    weights = np.array([outcome.weight for outcome in outcomes], np.float64)
    weights = weights / weights.mean()
    measured = np.array([not outcome.assumed for outcome in outcomes])

    def data(columns: NDArray[np.float32], with_answer: bool) -> _Data:
        names = regression.columns(with_answer)
        return _Data(texts, columns, labels, weights, measured, names, vocabulary, known, kernel)

    prompts = _fit_head(data(rows, False), seed)
    answers = [outcome.answer for outcome in outcomes]
    if any(text is None for text in answers):
        return LearnedRouter(prompts, None)
    described = [answer.describe(outcome.prompt, outcome.answer or "") for outcome in outcomes]
    return LearnedRouter(prompts, _fit_head(data(np.hstack((rows, described)), True), seed))


def _fit_head(data: _Data, seed: int) -> Head:
    rows = data.measured
    labels, weights = data.labels[rows], data.weights[rows]
    held_out = _held_out(data, seed)[:, rows]
    blend = blending.weigh(held_out, labels, weights)
    blended = sum(share * part for share, part in zip(blend, held_out, strict=True))
    parts = _fit_parts(data, seed)
    return Head(
        prior.load(),
        parts.linear,
        data.vocabulary,
        _gram_values(data, parts.gram_weights),
        parts.gram_base.astype(np.float32),
        parts.forest,
        blend,
        calibration.calibrate(blended, labels[:, 0], labels[:, 1], weights),
    )


def _fit_parts(data: _Data, seed: int) -> _Parts:
    linear = regression.fit(data.columns, data.labels, data.weights, data.names)
    forest = growing.grow(_widen(data), data.labels, data.weights, seed)
    return _Parts(linear, *_fit_grams(data), forest)


def _held_out(data: _Data, seed: int) -> Matrix:
    """[parts, rows, 2] in the order of `Blend`, each row predicted from the other folds."""
    said = np.zeros((len(Blend._fields), len(data.texts), 2))
    for kept, out in _folds(len(data.texts), seed):
        parts, unseen = _fit_parts(data.only(kept), seed), data.only(out)
        said[0, out] = regression.predict(parts.linear, unseen.columns)
        said[1, out] = growing.predict(parts.forest, _widen(unseen))
        said[2, out] = data.kernel[np.ix_(out, kept)] @ parts.gram_weights + parts.gram_base
    return said


def _widen(data: _Data) -> NDArray[np.float32]:
    return np.array([widen(*row) for row in zip(data.columns, data.prior, strict=True)], np.float32)


def _fit_grams(data: _Data) -> tuple[Matrix, Matrix]:
    """Ridge regression on grams, in its dual form: weights of the rows, and the shares it starts from."""
    base = np.average(data.labels, axis=0, weights=data.weights)
    shrink = np.diag(GRAM_SHRINK / np.maximum(data.weights, 1e-6))
    return np.linalg.solve(data.kernel + shrink, data.labels - base), base


def _gram_values(data: _Data, row_weights: Matrix) -> NDArray[np.float32]:
    values = np.zeros((len(data.vocabulary.rarity), 2))
    for text, weight in zip(data.texts, row_weights, strict=True):
        indices, shares = data.vocabulary.look_up(text)
        values[indices] += shares[:, None] * weight
    return values.astype(np.float32)


def _kernel(vocabulary: Vocabulary, texts: Sequence[Text]) -> Matrix:
    """Inner products of all rows' grams, from dense blocks: rows are few, grams many."""
    looked_up = [vocabulary.look_up(text) for text in texts]
    kernel = np.zeros((len(texts), len(texts)))
    block = 4096
    for start in range(0, len(vocabulary.rarity), block):
        dense = np.zeros((len(texts), block), np.float32)
        for row, (indices, shares) in enumerate(looked_up):
            inside = (indices >= start) & (indices < start + block)
            dense[row, indices[inside] - start] = shares[inside]
        kernel += dense @ dense.T
    return kernel


def _folds(count: int, seed: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Kept and left-out rows of each fold."""
    order = np.random.default_rng(seed).permutation(count)
    return [
        (np.sort(np.delete(order, np.s_[fold::FOLDS])), np.sort(order[fold::FOLDS]))
        for fold in range(FOLDS)
    ]
