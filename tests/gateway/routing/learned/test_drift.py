"""Measures of drift: still when nothing moves, loud when something does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.learned.drift import accuracy, stability_index


def test_equal_samples_are_stable_and_shifted_ones_are_not() -> None:
    draw = np.random.default_rng(0)
    reference = draw.normal(size=5000)
    assert stability_index(reference, reference) == 0
    assert stability_index(reference, draw.normal(size=5000)) < 0.02
    assert stability_index(reference, draw.normal(size=5000) + 1) > 0.25
    assert stability_index(reference, np.full(50, 99.0)) > 5


@settings(max_examples=50)
@given(st.lists(st.floats(-1, 1), min_size=1), st.lists(st.floats(-1, 1), min_size=1))
def test_never_below_zero(reference: list[float], recent: list[float]) -> None:
    assert stability_index(np.array(reference), np.array(recent)) >= -1e-9


def test_accuracy_says_when_it_cannot_be_chance() -> None:
    draw = np.random.default_rng(1)
    chances = draw.random(2000)
    right = (draw.random(2000) < chances).astype(float)
    honest = accuracy(chances.tolist(), right.tolist())
    assert not honest.drifted
    assert honest.brier < 0.25
    moved = accuracy((chances / 2).tolist(), right.tolist())
    assert moved.drifted
    assert moved.bias == pytest.approx(0.25, abs=0.03)
    assert not accuracy([0.0, 0.0], [1.0, 0.0]).drifted


def test_more_confidence_needs_more_room() -> None:
    rows = [0.5] * 100
    assert accuracy(rows, rows, 0.99).half_width > accuracy(rows, rows, 0.9).half_width
