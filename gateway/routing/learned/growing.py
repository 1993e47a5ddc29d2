"""Grows the forest with scikit-learn and turns it into arrays."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.forest import Forest

TREES: Final = 150
COLUMNS_SHARE: Final = 0.3
LEAF_ROWS: Final = 5
LEAF_ROWS_FEW: Final = 3
"""Below `MANY_ROWS` outcomes."""
MANY_ROWS: Final = 800


def grow(
    rows: NDArray[np.float32], labels: NDArray[np.float64], weights: NDArray[np.float64], seed: int
) -> Forest:
    """Extremely randomised trees for ``labels`` [rows, 2]: (weak, strong).

    The gain is a third output while growing, so that splits look for it; it needs no place in a leaf, since a leaf's
    mean gain is the difference of its means.
    """
    # Heavy, and needed for learning alone.
    from sklearn.ensemble import ExtraTreesRegressor

    model = ExtraTreesRegressor(
        TREES,
        min_samples_leaf=LEAF_ROWS if len(rows) >= MANY_ROWS else LEAF_ROWS_FEW,
        max_features=COLUMNS_SHARE,
        n_jobs=1,
        random_state=seed,
    )
    targets = np.column_stack((labels, labels[:, 1] - labels[:, 0]))
    model.fit(rows, targets, sample_weight=weights)
    return _join([_flatten(tree.tree_) for tree in model.estimators_])


def predict(forest: Forest, rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """[rows, 2]: the mean over the trees."""
    return np.array([forest.predict(row).mean(axis=0) for row in rows], np.float64).reshape(-1, 2)


def _flatten(tree: Any) -> Forest:
    """One tree with the children of a node side by side."""
    order, first_child = _renumber(tree.children_left, tree.children_right)
    leaf = tree.children_left[order] < 0
    threshold = tree.threshold[order]
    narrow = threshold.astype(np.float32)
    # Rounded down, so that float32 values compare as they did with the double.
    narrow = np.where(narrow > threshold, np.nextafter(narrow, np.float32(-np.inf)), narrow)
    return Forest(
        np.zeros(1, np.intp),
        np.where(leaf, 0, tree.feature[order]).astype(np.intp),
        np.where(leaf, np.float32(np.inf), narrow).astype(np.float32),
        np.where(leaf, np.arange(len(order)), first_child).astype(np.intp),
        tree.value[order, :2, 0].astype(np.float32),
    )


def _renumber(left: NDArray[Any], right: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Old numbers in new order, and each new node's first child."""
    order, first = [0], []
    for node in order:  # grows while it is walked: level by level
        first.append(len(order))
        if left[node] >= 0:
            order += [int(left[node]), int(right[node])]
    return np.array(order), np.array(first)


def _join(trees: list[Forest]) -> Forest:
    starts = np.cumsum([0, *(len(tree.column) for tree in trees[:-1])]).astype(np.intp)
    return Forest(
        starts,
        np.concatenate([tree.column for tree in trees]),
        np.concatenate([tree.threshold for tree in trees]),
        np.concatenate(
            [tree.child + start for tree, start in zip(trees, starts, strict=True)]
        ).astype(np.intp),
        np.concatenate([tree.value for tree in trees]),
    )
