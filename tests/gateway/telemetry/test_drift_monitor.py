"""The monitor of a head: silent on what it learned from, soon loud on something else."""

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.routing.learned.model import HeadKey
from gateway.telemetry.drift import HeadMonitor
from sluice.settings.routing import DriftRules
from sluice.v1 import admin_pb2

SETTINGS = DriftRules()
HEAD = HeadKey("routing", "r1", admin_pb2.ROUTER_HEAD_PROMPT)
EVERY = 100
"""Values from one look to the next."""


def gains(draw: np.random.Generator, count: int, mean: float = 0.1) -> NDArray[np.float32]:
    """As a router predicts them."""
    return draw.normal(mean, 0.1, count).astype(np.float32)


def fed(monitor: HeadMonitor, values: Iterable[float]) -> "list[admin_pb2.DriftState.ValueType]":
    """The states of its inputs, `EVERY` values apart."""
    states = []
    for number, value in enumerate(values, 1):
        monitor.predicted(value)
        if number % EVERY == 0:
            states.append(monitor.health.inputs.state)
    return states


def held_against(
    monitor: HeadMonitor, draw: np.random.Generator, count: int, bias: float = 0.0, first: int = 0
) -> "list[admin_pb2.DriftState.ValueType]":
    """Outcomes as likely as predicted, but for ``bias``: the states after each."""
    chances = draw.uniform(0.2, 0.8, count)
    right = (draw.random(count) < chances + bias).astype(float)
    states = []
    for number, pair in enumerate(zip(chances, right, strict=True), first):
        monitor.observed(*pair, f"req-{number}")
        states.append(monitor.health.accuracy.state)
    return states


@pytest.mark.parametrize(
    "held_out", [60, *(pytest.param(count, marks=pytest.mark.long) for count in (300, 1500))]
)
def test_traffic_like_the_outcomes_raises_hardly_ever_an_alarm(held_out: int) -> None:
    """Of 100 routers with 5,000 requests each: at most one, however few rows they learned from."""
    draw = np.random.default_rng(held_out)
    monitors = [HeadMonitor(HEAD, gains(draw, held_out), SETTINGS) for _ in range(100)]
    states = [fed(monitor, gains(draw, 5000).tolist()) for monitor in monitors]
    assert sum(admin_pb2.DRIFT_STATE_DRIFTED in one for one in states) <= 1
    assert {one[-1] for one in states} <= {
        admin_pb2.DRIFT_STATE_STABLE,
        admin_pb2.DRIFT_STATE_DRIFTED,
    }


@pytest.mark.parametrize("routers", [15, pytest.param(60, marks=pytest.mark.long)])
def test_predictions_that_hold_raise_hardly_ever_an_alarm(routers: int) -> None:
    """Of 60 routers with 400 outcomes each, after every one of which somebody looks: at most one."""
    settings = DriftRules(window=200)
    draw = np.random.default_rng(7)
    monitors = [HeadMonitor(HEAD, gains(draw, 300), settings) for _ in range(routers)]
    drifted = [
        admin_pb2.DRIFT_STATE_DRIFTED in held_against(monitor, draw, 400) for monitor in monitors
    ]
    assert sum(drifted) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_shift_is_seen_within_a_window_and_so_is_its_end(seed: int) -> None:
    draw = np.random.default_rng(seed)
    monitor = HeadMonitor(HEAD, gains(draw, 300), SETTINGS)
    looks = SETTINGS.window // EVERY
    assert admin_pb2.DRIFT_STATE_DRIFTED not in fed(monitor, gains(draw, 3000).tolist())
    shifted = fed(monitor, gains(draw, 3000, mean=0.2).tolist())
    assert set(shifted[looks - 1 :]) == {admin_pb2.DRIFT_STATE_DRIFTED}
    over = fed(monitor, gains(draw, 3000).tolist())
    assert set(over[looks - 1 :]) == {admin_pb2.DRIFT_STATE_STABLE}


def test_inputs_are_not_judged_before_there_are_enough() -> None:
    draw = np.random.default_rng(0)
    monitor = HeadMonitor(HEAD, gains(draw, 300), SETTINGS)
    fed(monitor, gains(draw, SETTINGS.min_predictions - 1, 0.4).tolist())
    assert monitor.health.inputs.state == admin_pb2.DRIFT_STATE_GATHERING
    assert not monitor.health.inputs.HasField("stability_index")
    monitor.predicted(0.4)
    inputs = monitor.health.inputs
    assert inputs.state == admin_pb2.DRIFT_STATE_DRIFTED
    assert inputs.stability_index > inputs.limit >= SETTINGS.stability_max


def test_a_bias_is_seen_and_so_is_its_end() -> None:
    draw = np.random.default_rng(3)
    monitor = HeadMonitor(HEAD, gains(draw, 1500), SETTINGS)
    states = held_against(monitor, draw, 400)
    assert set(states) == {admin_pb2.DRIFT_STATE_GATHERING, admin_pb2.DRIFT_STATE_STABLE}
    assert states.count(admin_pb2.DRIFT_STATE_GATHERING) == SETTINGS.min_outcomes - 1
    assert (
        held_against(monitor, draw, 1000, bias=-0.2, first=400)[-1] == admin_pb2.DRIFT_STATE_DRIFTED
    )
    found = monitor.health.accuracy
    assert found.bias < -found.half_width
    assert held_against(monitor, draw, 1000, first=1400)[-1] == admin_pb2.DRIFT_STATE_STABLE


def test_a_later_outcome_of_a_request_replaces_the_earlier_one() -> None:
    monitor = HeadMonitor(HEAD, np.zeros(100, np.float32), SETTINGS)
    for outcome in (0.0, 1.0):
        monitor.observed(0.5, outcome, "req-1")
    found = monitor.health.accuracy
    assert (found.rows, found.bias) == (1, 0.5)


def test_windows_are_bounded() -> None:
    settings = DriftRules(window=50, min_predictions=20)
    monitor = HeadMonitor(HEAD, np.linspace(-1, 1, 100, dtype=np.float32), settings)
    for number in range(3 * settings.window):
        monitor.predicted(0.0)
        monitor.observed(0.5, 0.5, f"req-{number}")
    assert (monitor.health.inputs.rows, monitor.health.accuracy.rows) == (50, 50)
