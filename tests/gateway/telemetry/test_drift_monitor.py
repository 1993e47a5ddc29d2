"""The monitor of a head: silent on what it learned from, soon loud on something else, and loud once."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gateway.routing.prediction import PROMPT, HeadKey
from gateway.telemetry.drift import CLEAR, Change, HeadMonitor, drifted
from sluice.settings.routing import DriftSettings
from sluice.v1.admin_pb2 import (
    DRIFT_CHANGE_BEGAN,
    DRIFT_CHANGE_ENDED,
    DRIFT_SIGNAL_ACCURACY,
    DRIFT_SIGNAL_INPUTS,
    DRIFT_STATE_DRIFTED,
    DRIFT_STATE_GATHERING,
    DRIFT_STATE_STABLE,
)

SETTINGS = DriftSettings()
HEAD = HeadKey("routing", "r1", PROMPT)
BEGAN = Change(DRIFT_SIGNAL_INPUTS, DRIFT_CHANGE_BEGAN)
ENDED = Change(DRIFT_SIGNAL_INPUTS, DRIFT_CHANGE_ENDED)


def gains(draw: np.random.Generator, count: int, mean: float = 0.1) -> NDArray[np.float32]:
    """As a router predicts them."""
    return draw.normal(mean, 0.1, count).astype(np.float32)


def fed(monitor: HeadMonitor, values: Iterable[float]) -> list[tuple[int, Change]]:
    """What it says, and after how many values."""
    said = [(number, monitor.predicted(value)) for number, value in enumerate(values, 1)]
    return [(number, change) for number, change in said if change is not None]


def held_against(
    monitor: HeadMonitor, draw: np.random.Generator, count: int, bias: float = 0.0
) -> list[Change]:
    """Outcomes as likely as predicted, but for ``bias``."""
    chances = draw.uniform(0.2, 0.8, count)
    right = draw.random(count) < chances + bias
    said = [monitor.observed(*pair) for pair in zip(chances, right.astype(float), strict=True)]
    return [change for change in said if change is not None]


@pytest.mark.parametrize(
    "held_out", [60, *(pytest.param(count, marks=pytest.mark.long) for count in (300, 1500))]
)
def test_traffic_like_the_outcomes_raises_hardly_ever_an_alarm(held_out: int) -> None:
    """Of 100 routers with 5,000 requests each: at most one, however few rows they learned from."""
    draw = np.random.default_rng(held_out)
    monitors = [HeadMonitor(HEAD, gains(draw, held_out), SETTINGS) for _ in range(100)]
    alarms = [fed(monitor, gains(draw, 5000).tolist()) for monitor in monitors]
    assert sum(bool(one) for one in alarms) <= 1
    assert {monitor.health.inputs.state for monitor in monitors} <= {
        DRIFT_STATE_STABLE,
        DRIFT_STATE_DRIFTED,
    }


@pytest.mark.parametrize("routers", [15, pytest.param(60, marks=pytest.mark.long)])
def test_predictions_that_hold_raise_hardly_ever_an_alarm(routers: int) -> None:
    """Of 60 routers with 400 outcomes each, at every one of which they are judged: at most one."""
    settings = DriftSettings(window=200)
    draw = np.random.default_rng(7)
    monitors = [HeadMonitor(HEAD, gains(draw, 300), settings) for _ in range(routers)]
    assert sum(bool(held_against(monitor, draw, 400)) for monitor in monitors) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_shift_is_told_within_a_window_once_and_so_is_its_end(seed: int) -> None:
    draw = np.random.default_rng(seed)
    monitor = HeadMonitor(HEAD, gains(draw, 300), SETTINGS)
    assert fed(monitor, gains(draw, 3000).tolist()) == []
    ((after, change),) = fed(monitor, gains(draw, 3000, mean=0.2).tolist())
    assert (change, after <= SETTINGS.window) == (BEGAN, True)
    assert drifted(monitor.health) == [DRIFT_SIGNAL_INPUTS]
    ((after, change),) = fed(monitor, gains(draw, 3000).tolist())
    assert (change, after <= SETTINGS.window) == (ENDED, True)
    assert drifted(monitor.health) == []


def test_another_source_from_the_start_is_told_with_the_first_judgement() -> None:
    draw = np.random.default_rng(0)
    monitor = HeadMonitor(HEAD, gains(draw, 300), SETTINGS)
    assert fed(monitor, gains(draw, SETTINGS.min_rows - 1, 0.4).tolist()) == []
    assert monitor.health.inputs.state == DRIFT_STATE_GATHERING
    assert not monitor.health.inputs.HasField("stability_index")
    assert monitor.predicted(0.4) == BEGAN
    inputs = monitor.health.inputs
    assert inputs.stability_index > inputs.limit >= SETTINGS.stability_max


def test_few_held_out_rows_raise_the_limit() -> None:
    draw = np.random.default_rng(0)
    monitor = HeadMonitor(HEAD, gains(draw, 30), SETTINGS)
    fed(monitor, gains(draw, 300).tolist())
    assert monitor.health.inputs.limit > 2 * SETTINGS.stability_max


def test_a_bias_is_told_and_so_is_its_end() -> None:
    draw = np.random.default_rng(3)
    monitor = HeadMonitor(HEAD, gains(draw, 1500), SETTINGS)
    assert held_against(monitor, draw, 400) == []
    assert monitor.health.accuracy.state == DRIFT_STATE_STABLE
    assert held_against(monitor, draw, 1000, bias=-0.2) == [
        Change(DRIFT_SIGNAL_ACCURACY, DRIFT_CHANGE_BEGAN)
    ]
    found = monitor.health.accuracy
    assert found.bias < -found.half_width
    assert drifted(monitor.health) == [DRIFT_SIGNAL_ACCURACY]
    assert held_against(monitor, draw, 1000) == [Change(DRIFT_SIGNAL_ACCURACY, DRIFT_CHANGE_ENDED)]


def test_a_later_outcome_of_a_request_replaces_the_earlier_one() -> None:
    monitor = HeadMonitor(HEAD, np.zeros(100, np.float32), SETTINGS)
    for outcome in (0.0, 1.0):
        monitor.observed(0.5, outcome, "req-1")
    found = monitor.health.accuracy
    assert (found.rows, found.bias) == (1, 0.5)
    for _ in range(2):
        monitor.observed(0.5, 0.5)
    assert monitor.health.accuracy.rows == 3


def test_windows_are_bounded() -> None:
    settings = DriftSettings(window=50, min_rows=20)
    monitor = HeadMonitor(HEAD, np.linspace(-1, 1, 100, dtype=np.float32), settings)
    for _ in range(3 * settings.window):
        monitor.predicted(0.0)
        monitor.observed(0.5, 0.5)
    assert (monitor.health.inputs.rows, monitor.health.accuracy.rows) == (50, 50)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=120))
def test_beginnings_and_ends_take_turns_and_each_has_its_cause(
    pairs: list[tuple[float, float]],
) -> None:
    settings = DriftSettings(window=50, min_rows=20, min_outcomes=10, confidence=0.5)
    monitor = HeadMonitor(HEAD, np.zeros(10_000, np.float32), settings)
    was_drifted = False
    for chance, outcome in pairs:
        change = monitor.observed(chance, outcome)
        found = monitor.health.accuracy
        share = abs(found.bias) / found.half_width
        if change is not None:
            began = change.change == DRIFT_CHANGE_BEGAN
            assert began is not was_drifted
            assert share > 1 if began else share < CLEAR
            was_drifted = began
        elif found.rows >= settings.min_outcomes:
            assert share >= CLEAR if was_drifted else share <= 1
        assert (monitor.health.accuracy.state == DRIFT_STATE_DRIFTED) is was_drifted
