"""Thresholds reach their targets on the held-out rows, and gains mean what they say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.learned.model import Calibration
from learning.train import calibrate


def made(count: int = 400, seed: int = 0, steepness: float = 0.5) -> Calibration:
    """Raw gains that are ``1 / steepness`` times too timid."""
    draw = np.random.default_rng(seed)
    chance = draw.random(count)
    weak = (draw.random(count) > chance).astype(np.float64)
    labels = np.column_stack((weak, np.ones(count)))
    raw = np.column_stack((1 - steepness * chance, np.ones(count)))
    return calibrate(raw, labels, np.ones(count))


def test_a_timid_gain_is_stretched() -> None:
    found = made(4000)
    assert found.lines[0, 0] == pytest.approx(2.0, abs=0.15)
    timid = found.estimate(0.75, 1.0)
    assert timid.gain == pytest.approx(0.5, abs=0.05)
    assert timid.p_weak == pytest.approx(0.5, abs=0.05)
    assert timid.p_strong == pytest.approx(timid.p_weak + timid.gain)
    beyond = found.estimate(-9.0, 0.0)
    assert (beyond.gain, beyond.p_weak, beyond.p_strong) == (1, 0, 1)
    assert found.estimate(9.0, 0.0).gain == -1


@given(st.integers(0, 30), st.floats(0, 1))
def test_targets_hold_on_the_held_out_rows(seed: int, share: float) -> None:
    found = made(200, seed)
    kept = found.for_quality(share)
    sent = found.gains >= kept.value
    quality = float(np.where(sent, found.strong, found.weak).mean())
    assert quality >= share * found.strong.mean() - 1e-6
    assert kept.quality == pytest.approx(quality, abs=1e-6)
    capped = found.for_large_share(share)
    assert (found.gains >= capped.value).mean() == pytest.approx(capped.large_share)
    assert capped.large_share <= share + 1e-9


def test_equal_gains_stay_together() -> None:
    ties = np.array([0.1, 0.3, 0.3, 0.3], np.float32)
    found = Calibration(np.eye(2), ties, np.zeros(4, np.float32), np.ones(4, np.float32))
    assert found.for_large_share(0.5).large_share == 0
    assert found.for_large_share(0.75).large_share == 0.75
    assert found.for_quality(0.5).large_share == 0.75
    assert found.for_quality(1.0).large_share == 1.0
    assert found.for_quality(0.0).large_share == 0.0
