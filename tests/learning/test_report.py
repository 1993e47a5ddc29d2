"""Figures by their definitions."""

import numpy as np
import pytest

from learning.report import figures, trace

WEAK = np.array([0.0] * 5 + [1.0] * 5)
STRONG = np.ones(10)


def test_a_perfect_order() -> None:
    curve = trace(1 - WEAK, WEAK, STRONG)
    assert curve.cpt(50) == pytest.approx(25)
    assert curve.cpt(80) == pytest.approx(40)
    assert curve.apgr() == pytest.approx(0.75)
    assert curve.share_for(0.9) == pytest.approx(0.4)


def test_equal_scores_are_at_random() -> None:
    curve = trace(np.zeros(10), WEAK, STRONG)
    assert curve.apgr() == pytest.approx(0.5)
    assert curve.cpt(80) == pytest.approx(80)


def test_without_a_gap_only_the_ends_are_told() -> None:
    assert figures(trace(np.arange(10.0), STRONG, WEAK)) == {"weak": 1.0, "strong": 0.5}
