"""Measures of drift: still when nothing moves, loud when something does."""

import numpy as np
import pytest

from gateway.telemetry.drift import BINS, Reference, accuracy

MANY = 1_000_000
"""Rows to learn from that leave nothing to chance."""


def test_equal_samples_are_stable_and_shifted_ones_are_not() -> None:
    draw = np.random.default_rng(0)
    scores = draw.normal(size=5000)
    reference = Reference(scores)
    assert reference.stability_index(scores) == 0
    assert reference.stability_index(draw.normal(size=5000)) < 0.02
    assert reference.stability_index(draw.normal(size=5000) + 1) > 0.25
    assert reference.stability_index(np.full(50, 99.0)) > 5


@pytest.mark.parametrize(
    ("held_out", "rows"),
    [
        (100, 300),
        *(
            pytest.param(*sizes, marks=pytest.mark.long)
            for sizes in ((300, 200), (300, 1000), (1500, 200))
        ),
    ],
)
def test_chance_stays_below_its_limit_as_often_as_it_says(held_out: int, rows: int) -> None:
    draw = np.random.default_rng(2)
    above = {0.5: 0, 0.95: 0}
    for _ in range(1000):
        reference = Reference(draw.normal(size=held_out))
        index = reference.stability_index(draw.normal(size=rows))
        for confidence in above:
            above[confidence] += index > reference.chance_index(rows, confidence)
    # Somewhat less often: the blur takes some of the chance away.
    assert 350 < above[0.5] < 600
    assert 10 < above[0.95] < 80


def test_gains_within_a_hair_of_the_same_are_the_same() -> None:
    """As of two kinds of prompts that a router knows by heart."""
    draw = np.random.default_rng(3)
    kinds = draw.choice([-0.2, 0.6], 500)
    reference = Reference(kinds + draw.normal(0, 0.002, 500))
    assert reference.stability_index(kinds + draw.normal(0.005, 0.002, 500)) < 0.02
    assert reference.stability_index(kinds + 0.2) > 0.25
    assert reference.stability_index(np.full(500, 0.6)) > 1


def test_scores_that_are_all_the_same_have_a_limit_too() -> None:
    same = Reference(np.zeros(BINS))
    assert 0 < same.chance_index(100, 0.999) < 2
    assert same.stability_index(np.zeros(5)) == 0
    assert same.stability_index(np.full(5, -1.0)) > 2


def test_accuracy_says_when_it_cannot_be_chance() -> None:
    draw = np.random.default_rng(1)
    chances = draw.random(2000)
    right = (draw.random(2000) < chances).astype(float)
    honest = accuracy(chances.tolist(), right.tolist(), 0.95, MANY)
    assert abs(honest.bias) < honest.half_width
    assert honest.brier < 0.25
    moved = accuracy((chances / 2).tolist(), right.tolist(), 0.95, MANY)
    assert moved.bias > moved.half_width
    assert moved.bias == pytest.approx(0.25, abs=0.03)
    few = accuracy([0.0, 0.0], [1.0, 0.0], 0.95, MANY)
    assert few.bias == 0.5
    assert few.bias < few.half_width


def test_more_confidence_and_less_to_learn_from_need_more_room() -> None:
    rows = [0.5] * 100
    widths = [accuracy(rows, rows, *more).half_width for more in ((0.9, MANY), (0.99, MANY))]
    assert widths[0] < widths[1] < accuracy(rows, rows, 0.99, 300).half_width
