"""The walk over all trees at once gives what scikit-learn gives."""

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from gateway.routing.learned import growing
from gateway.routing.learned.forest import Forest


def test_agrees_with_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(300, 7)).astype(np.float32)
    labels = np.column_stack((rows[:, 0] > 0, rows[:, 1] + rows[:, 2] > 0)).astype(np.float64)
    forest = growing.grow(rows, labels, np.ones(300), seed=4)
    model = ExtraTreesRegressor(
        growing.TREES,
        min_samples_leaf=growing.LEAF_ROWS_FEW,
        max_features=growing.COLUMNS_SHARE,
        random_state=4,
    )
    model.fit(rows, np.column_stack((labels, labels[:, 1] - labels[:, 0])))
    fresh = draw.normal(size=(200, 7)).astype(np.float32)
    np.testing.assert_allclose(
        growing.predict(forest, fresh), model.predict(fresh)[:, :2], atol=1e-6
    )


def test_a_value_on_the_threshold_goes_to_the_first_child() -> None:
    forest = Forest(
        np.array([0]),
        np.array([0, 0, 0]),
        np.array([0.5, np.inf, np.inf], np.float32),
        np.array([1, 1, 2]),
        np.array([[0, 0], [0.1, 0.2], [0.3, 0.4]], np.float32),
    )
    for value, leaf in ((0.5, 1), (0.51, 2), (-1e30, 1), (1e30, 2)):
        np.testing.assert_array_equal(
            forest.predict(np.array([value], np.float32)), forest.value[[leaf]]
        )
