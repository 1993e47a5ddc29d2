"""From outcomes to a router. Pure code; the same outcomes and seed give the same router.

The prompt head is the mean of logistic regressions on hashed words and extremely randomised trees on columns of the
prompt; the cascade head is a pair of logistic regressions on columns of prompt and answer. Each head is fitted once
more in folds: the held-out predictions give the calibration and the thresholds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import LogisticRegression

from gateway.routing.learned.calibration import calibrate
from gateway.routing.learned.model import (
    CLIP,
    HASHED,
    Example,
    Head,
    LearnedRouter,
    Linear,
    Part,
    Trees,
    Vector,
    Words,
    answer_example,
    damp,
    mean_of,
    pack,
    prompt_example,
)
from learning.outcomes import ROWS_MIN, OneSided, Outcome, TooFewOutcomes

Matrix = NDArray[np.float64]

FOLDS: Final = 5
TREES: Final = 100
FREQUENT_WORDS: Final = 100
COLUMNS_SHARE: Final = 0.3
"""Of the columns that a split of a tree chooses from."""
LEAF_ROWS: Final = 5
LEAF_ROWS_FEW: Final = 3
"""Below `MANY_ROWS` outcomes."""
MANY_ROWS: Final = 800
C_WORDS: Final = 1.0
C_LINEAR: Final = 0.01
"""Inverse regularisation strength."""

ONE_SIDED_WEIGHT: Final = 0.3
"""Of a row with one side beside one with both."""
ONE_SIDED_SHARE_MAX: Final = 2.0
"""Rows with one side together weigh at most so many times as much as the others."""

_Fit = Callable[[Sequence[Example], Matrix, Matrix, int], tuple[Part, ...]]


def train(
    outcomes: Sequence[Outcome], seed: int = 0, one_sided: Sequence[OneSided] = ()
) -> LearnedRouter:
    """Learns a router; with a head for cascades where every outcome has the small model's answer.

    A router learned from ``outcomes`` predicts the missing side of ``one_sided`` rows; then they teach as well, with
    less weight. Calibration comes from ``outcomes`` alone.

    Raises:
        TooFewOutcomes: see `outcomes.gather`.
    """
    if len(outcomes) < ROWS_MIN:
        raise TooFewOutcomes(f"{len(outcomes)} outcomes, at least {ROWS_MIN} are needed")
    router = _fit(outcomes, (), seed)
    return _fit(outcomes, _filled(router, outcomes, one_sided), seed) if one_sided else router


def _filled(
    router: LearnedRouter, outcomes: Sequence[Outcome], one_sided: Sequence[OneSided]
) -> list[Outcome]:
    total = sum(row.weight for row in one_sided) * ONE_SIDED_WEIGHT
    most = sum(outcome.weight for outcome in outcomes) * ONE_SIDED_SHARE_MAX
    scale = ONE_SIDED_WEIGHT * min(1.0, most / total) if total > 0 else 0.0
    filled = []
    for row in one_sided:
        predicted = router.score(row.prompt)
        weak = predicted.p_weak if row.weak is None else row.weak
        strong = predicted.p_strong if row.strong is None else row.strong
        filled.append(Outcome("", row.prompt, weak, strong, row.answer, row.weight * scale))
    return filled


def _fit(outcomes: Sequence[Outcome], filled: Sequence[Outcome], seed: int) -> LearnedRouter:
    rows = [*outcomes, *filled]
    examples = [prompt_example(row.prompt) for row in rows]
    prompts = _fit_head(_fit_prompts, examples, rows, len(outcomes), seed)
    if any(outcome.answer is None for outcome in outcomes):
        return LearnedRouter(prompts, None)
    answered = [row for row in rows if row.answer is not None]
    answers = [answer_example(row.prompt, row.answer or "") for row in answered]
    return LearnedRouter(prompts, _fit_head(_fit_answers, answers, answered, len(outcomes), seed))


def _fit_head(
    fit: _Fit, examples: Sequence[Example], rows: Sequence[Outcome], measured: int, seed: int
) -> Head:
    """A head fitted to ``rows``, of which the first ``measured`` calibrate it."""
    labels = np.array([(row.weak, row.strong) for row in rows], np.float64)
    weights = np.array([row.weight for row in rows], np.float64)
    weights = weights / weights[:measured].mean()
    held_out = np.zeros_like(labels)
    order = np.random.default_rng(seed).permutation(len(rows))
    for fold in range(FOLDS):
        out = order[fold::FOLDS]
        kept = np.sort(np.delete(order, np.s_[fold::FOLDS]))
        parts = fit([examples[row] for row in kept], labels[kept], weights[kept], seed)
        held_out[out] = [mean_of(parts, examples[row]) for row in out]
    parts = fit(examples, labels, weights, seed)
    return Head(parts, calibrate(held_out[:measured], labels[:measured], weights[:measured]))


def _fit_prompts(
    examples: Sequence[Example], labels: Matrix, weights: Matrix, seed: int
) -> tuple[Part, ...]:
    return _words(examples, labels, weights), _trees(examples, labels, weights, seed)


def _fit_answers(
    examples: Sequence[Example], labels: Matrix, weights: Matrix, seed: int
) -> tuple[Part, ...]:
    return (_linear(examples, labels, weights),)


def _words(examples: Sequence[Example], labels: Matrix, weights: Matrix) -> Words:
    buckets = np.concatenate([example.buckets for example in examples])
    rows = np.repeat(np.arange(len(examples)), [len(example.buckets) for example in examples])
    counts = np.bincount(buckets, minlength=HASHED)
    rarity = np.where(counts < 2, 0.0, np.log((1 + len(examples)) / (1 + counts)) + 1)
    norms = np.sqrt(np.bincount(rows, rarity[buckets] ** 2, minlength=len(examples)))
    values = rarity[buckets] / np.maximum(norms, 1e-6)[rows]
    matrix = csr_matrix((values, (rows, buckets)), shape=(len(examples), HASHED))
    return Words(rarity.astype(np.float32), *_regressions(matrix, labels, weights, C_WORDS))


def _linear(examples: Sequence[Example], labels: Matrix, weights: Matrix) -> Linear:
    columns = damp(np.array([example.columns for example in examples])).astype(np.float64)
    mean, scale = columns.mean(axis=0), columns.std(axis=0) + 1e-3
    scaled = np.clip((columns - mean) / scale, -CLIP, CLIP)
    fitted = _regressions(scaled, labels, weights, C_LINEAR)
    return Linear(mean.astype(np.float32), scale.astype(np.float32), *fitted)


def _regressions(
    matrix: Any, labels: Matrix, weights: Matrix, strength: float
) -> tuple[Vector, Vector]:
    """Coefficients [columns, 2] and intercepts [2]. A label of 0.7 counts as 0.7 of a right and 0.3 of a wrong row."""
    twice = vstack([matrix, matrix], format="csr") if isinstance(matrix, csr_matrix) else None
    twice = np.vstack([matrix, matrix]) if twice is None else twice
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


def _trees(examples: Sequence[Example], labels: Matrix, weights: Matrix, seed: int) -> Trees:
    """Extremely randomised trees.

    The gain is a third output while they grow, so that splits look for it; a leaf needs no place for it, since its mean
    gain is the difference of its means.
    """
    frequent = _frequent_words(examples)
    empty = np.zeros(0)
    counter = Trees(pack(frequent), *(empty.astype(kind) for kind in "llflf"))
    rows = np.array([[*each.columns, *counter.counts(each.tokens)] for each in examples])
    model = ExtraTreesRegressor(
        TREES,
        min_samples_leaf=LEAF_ROWS if len(rows) >= MANY_ROWS else LEAF_ROWS_FEW,
        max_features=COLUMNS_SHARE,
        n_jobs=1,
        random_state=seed,
    )
    targets = np.column_stack((labels, labels[:, 1] - labels[:, 0]))
    model.fit(rows, targets, sample_weight=weights)
    return _flatten(pack(frequent), [each.tree_ for each in model.estimators_])


def _frequent_words(examples: Sequence[Example]) -> list[str]:
    """The words of most prompts, ties in order of the alphabet."""
    counts = Counter(word for each in examples for word in set(each.tokens))
    words = [item for item in counts.items() if not item[0][0].isdigit()]
    return [
        word for word, _ in sorted(words, key=lambda item: (-item[1], item[0]))[:FREQUENT_WORDS]
    ]


def _flatten(words: NDArray[np.uint8], trees: Sequence[Any]) -> Trees:
    starts = np.cumsum([0, *(tree.node_count for tree in trees[:-1])])
    column = np.concatenate([tree.feature for tree in trees])
    leaf = column < 0
    left, right = (
        np.concatenate(
            [getattr(tree, side) + start for tree, start in zip(trees, starts, strict=True)]
        )
        for side in ("children_left", "children_right")
    )
    here = np.arange(len(column))
    children = np.column_stack((np.where(leaf, here, left), np.where(leaf, here, right)))
    threshold = np.concatenate([tree.threshold for tree in trees])
    narrow = threshold.astype(np.float32)
    # Rounded down, so that float32 values compare as they did with the double.
    narrow = np.where(narrow > threshold, np.nextafter(narrow, np.float32(-np.inf)), narrow)
    return Trees(
        words,
        starts.astype(np.intp),
        np.where(leaf, 0, column).astype(np.intp),
        narrow,
        children.ravel().astype(np.intp),
        np.concatenate([tree.value[:, :2, 0] for tree in trees]).astype(np.float32),
    )
