"""How parts are weighed against one another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gateway.routing.learned import blending

ROWS = 400
ONES = np.ones(ROWS)


def labels(seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).integers(0, 2, (ROWS, 2)).astype(np.float64)


def says(gain: NDArray[np.float64]) -> NDArray[np.float64]:
    """A part that says ``gain``."""
    return np.column_stack((np.zeros(ROWS), gain))


def test_what_knows_most_counts_most_and_what_knows_little_not_at_all() -> None:
    truth = labels(0)
    gain, draw = truth[:, 1] - truth[:, 0], np.random.default_rng(1)
    clear, unclear, little = (gain + noise * draw.standard_normal(ROWS) for noise in (0.3, 0.7, 4))
    blend = blending.weigh(np.array([says(clear), says(unclear), says(little)]), truth, ONES)
    assert blend.regressions > 2 * blend.forest > 0 == blend.grams


def test_of_two_that_say_the_same_each_counts_half() -> None:
    truth = labels(0)
    part = says(truth[:, 1] - truth[:, 0])
    blend = blending.weigh(np.array([part, part, -part]), truth, ONES)
    assert blend == pytest.approx((0.5, 0.5, 0))


def test_units_do_not_matter() -> None:
    truth = labels(0)
    part = says((truth[:, 1] - truth[:, 0]) / 50)
    blend = blending.weigh(np.array([part, 10 * part, 0 * part]), truth, ONES)
    assert blend.regressions == pytest.approx(10 * blend.forest)
    assert blend.grams == 0


def test_parts_that_say_nothing_count_the_same() -> None:
    blend = blending.weigh(np.zeros((3, ROWS, 2)), labels(0), ONES)
    assert blend == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_rows_count_by_their_weight() -> None:
    """Half of the rows side with one part, the others with another."""
    truth = labels(0)
    gain, first = truth[:, 1] - truth[:, 0], np.arange(ROWS) < ROWS / 2
    parts = np.array([says(gain * first), says(gain * ~first), says(0 * gain)])
    blend = blending.weigh(parts, truth, np.where(first, 1.9, 0.1))
    assert blend.regressions > blend.forest


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.floats(0, 3))
def test_shares_add_up_and_none_is_below_zero(seed: int, noise: float) -> None:
    draw = np.random.default_rng(seed)
    truth = labels(seed)
    parts = truth + noise * draw.standard_normal((3, ROWS, 2)) * draw.integers(0, 2, (3, 1, 1))
    blend = blending.weigh(parts, truth, draw.random(ROWS))
    assert sum(blend) == pytest.approx(1)
    assert min(blend) >= 0
