"""From outcomes to a router. Pure code; the same outcomes and seed give the same router.

The forest also sees what grams say about rows they have not seen, and the prior. Everything once more in folds gives
the held-out predictions for the blend, the calibration and the thresholds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned import answer, calibration, features, grams, growing, prior, regression
from gateway.routing.learned.forest import Forest
from gateway.routing.learned.grams import Vocabulary
from gateway.routing.learned.head import Head, widen
from gateway.routing.learned.linear import Linear
from gateway.routing.learned.outcomes import ROWS_MIN, Outcome, TooFewOutcomes
from gateway.routing.learned.router import LearnedRouter
from gateway.routing.learned.text import Text, parse

Matrix = NDArray[np.float64]

FOLDS: Final = 5
GRAM_SHRINK: Final = 2.0
_CLEAR: Final = 2.0
"""Standard errors above zero."""


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
    regressed, grown = _held_out(data, seed)
    blend = _blend(regressed, grown, data.labels, data.weights)
    parts = _fit_parts(data, seed)
    rows = data.measured
    held_out = (blend * regressed + (1 - blend) * grown)[rows]
    labels, weights = data.labels[rows], data.weights[rows]
    return Head(
        prior.load(),
        parts.linear,
        data.vocabulary,
        _gram_values(data, parts.gram_weights),
        parts.gram_base.astype(np.float32),
        parts.forest,
        blend,
        calibration.calibrate(held_out, labels[:, 0], labels[:, 1], weights),
    )


def _fit_parts(data: _Data, seed: int) -> _Parts:
    """All parts from ``data``; the forest learns from what grams say about rows left out in turn."""
    said = np.zeros((len(data.texts), 2))
    for kept, out in _folds(len(data.texts), seed + 1):
        weights, base = _fit_grams(data.only(kept))
        said[out] = data.kernel[np.ix_(out, kept)] @ weights + base
    forest = growing.grow(_widen(data, said), data.labels, data.weights, seed)
    linear = regression.fit(data.columns, data.labels, data.weights, data.names)
    return _Parts(linear, *_fit_grams(data), forest)


def _held_out(data: _Data, seed: int) -> tuple[Matrix, Matrix]:
    """[rows, 2] of the regressions and of the forest, each row predicted from the other folds."""
    count = len(data.texts)
    regressed, grown = np.zeros((count, 2)), np.zeros((count, 2))
    for kept, out in _folds(count, seed):
        parts = _fit_parts(data.only(kept), seed)
        regressed[out] = regression.predict(parts.linear, data.columns[out])
        said = data.kernel[np.ix_(out, kept)] @ parts.gram_weights + parts.gram_base
        grown[out] = growing.predict(parts.forest, _widen(data.only(out), said))
    return regressed, grown


def _widen(data: _Data, said: Matrix) -> NDArray[np.float32]:
    rows = zip(data.columns, data.prior, said, strict=True)
    return np.array([widen(*row) for row in rows], np.float32)


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


def _blend(regressed: Matrix, grown: Matrix, labels: Matrix, weights: Matrix) -> float:
    """Share of the regressions, by least squares on both held-out gains where these say clearly that they count.

    Otherwise by the number of rows: equal parts where they are few, the forest alone where they are many.
    """
    gains = np.column_stack([part[:, 1] - part[:, 0] for part in (regressed, grown)])
    centred = gains - np.average(gains, axis=0, weights=weights)
    gain = labels[:, 1] - labels[:, 0]
    gain = gain - np.average(gain, weights=weights)
    spread = np.maximum(centred.std(axis=0), 1e-6)
    scaled = centred / spread
    inverse = np.linalg.inv((scaled.T * weights) @ scaled + np.eye(2))
    parts = inverse @ ((scaled.T * weights) @ gain)
    error = np.sqrt(np.average((gain - scaled @ parts) ** 2, weights=weights) * inverse[0, 0])
    if parts[0] < _CLEAR * error:
        parts = np.array([0.0 if len(gain) >= growing.MANY_ROWS else 1.0, 1.0])
    parts = np.maximum(parts, 0) / spread
    return float(parts[0] / parts.sum())


def _folds(count: int, seed: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Kept and left-out rows of each fold."""
    order = np.random.default_rng(seed).permutation(count)
    return [
        (np.sort(np.delete(order, np.s_[fold::FOLDS])), np.sort(order[fold::FOLDS]))
        for fold in range(FOLDS)
    ]
