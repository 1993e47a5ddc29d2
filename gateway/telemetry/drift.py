"""Drift of the learned routers in use: feeds their monitors; logs, counts and publishes a drift.

The event loop owns the monitors. Metrics are read on other threads, which read single values only.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.drift import Change, HeadHealth, HeadMonitor, Signal, State
from gateway.routing.plan import CASCADE, Plan
from gateway.routing.prediction import PROMPT, HeadKey, HeadScore
from sluice.settings.routing import DriftSettings
from sluice.telemetry import catalog
from sluice.telemetry.catalog import Metric
from sluice.telemetry.registry import MetricRegistry, Point
from sluice.v1.admin_pb2 import (
    DRIFT_CHANGE_BEGAN,
    DRIFT_CHANGE_ENDED,
    DRIFT_CHANGE_RETIRED,
    AccuracyDrift,
    DriftChange,
    DriftSignal,
    DriftState,
    GetRouterHealthResponse,
    InputDrift,
    RequestRecord,
    RouterDriftEvent,
    RouterHead,
    RouterHealth,
)
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_CASCADE
from sluice.wire.clock import timestamp, unix_ms
from sluice.wire.enums import value_of, word_of

_log = logging.getLogger(__name__)

Announce = Callable[[RouterDriftEvent], None]
HeldOut = Mapping[HeadKey, NDArray[np.float32]]
"""See `gateway.routing.router.Router.held_out`."""

_GAUGES: Final = (catalog.INPUT_DRIFT, catalog.ACCURACY_BIAS, catalog.BRIER)


class DriftMonitor:
    """Monitors the heads of the learned routers in use.

    Args:
        announce: sends an event to operators; must not wait.
    """

    def __init__(self, gateway_id: str, announce: Announce, registry: MetricRegistry) -> None:
        self._gateway_id = gateway_id
        self._announce = announce
        self._settings = DriftSettings()
        self._held_out: HeldOut = {}
        self._monitors: Mapping[HeadKey, HeadMonitor] = {}
        self._events = registry.counter(catalog.DRIFT_EVENTS)
        for gauge in _GAUGES:
            registry.observe(gauge, partial(self._values, gauge))

    def use(self, held_out: HeldOut, settings: DriftSettings) -> None:
        """Monitors these heads from now on; the windows of those that have not changed are kept."""
        monitors = {}
        for by, gains in held_out.items():
            old = self._monitors.get(by)
            same = settings == self._settings and old and np.array_equal(gains, self._held_out[by])
            monitors[by] = old if old and same else HeadMonitor(gains, settings)
        for by, monitor in self._monitors.items():
            if monitors.get(by) is not monitor:
                self._retire(by, monitor.health)
        self._monitors, self._held_out, self._settings = monitors, held_out, settings

    def scored(self, score: HeadScore) -> None:
        """A head predicted something for a request."""
        monitor = self._monitors.get(score.by)
        if monitor is not None:
            self._report(score.by, monitor, monitor.predicted(score.gain))

    def observed(self, by: HeadKey, chance: float, outcome: float, request_id: str = "") -> None:
        """The outcome, 0 to 1, of what ``by`` predicted with ``chance``; ignored when that head is not in use any more.

        A later outcome of the same request replaces an earlier one; without ``request_id`` each counts.
        """
        monitor = self._monitors.get(by)
        if monitor is not None:
            self._report(by, monitor, monitor.observed(chance, outcome, request_id))

    def graded(self, record: RequestRecord, grade: float) -> None:
        """A caller's grade of an answer, 0 to 1: the outcome of what was predicted for the model that gave it.

        It counts for the head that was asked last, but in a cascade not for the prompt head: a small model's answer is
        kept because it looks good, so the kept ones are better than the prediction for all.
        """
        scores = record.route.scores
        models = [one.model for one in record.attempts]
        if not scores or not models or record.error_reason:
            return
        last, model = scores[-1], models[-1]
        by = HeadKey(last.policy, last.version, word_of(RouterHead, last.head))
        if by.head == PROMPT and record.route.strategy == ROUTE_STRATEGY_CASCADE:
            return
        if model in last.chances:
            self.observed(by, last.chances[model], grade, record.request_id)

    def compared(self, plan: Plan, weak: str, agreement: float, row_id: str) -> None:
        """The outcome of a shadow: how far ``weak`` agrees with the strong model; counts where the settings say so.

        It does not count in a cascade, for the reason given at `graded`.
        """
        prompt = next((score for score in plan.scores if score.by.head == PROMPT), None)
        if not self._settings.shadows or prompt is None or plan.strategy == CASCADE:
            return
        if weak in prompt.chances:
            self.observed(prompt.by, prompt.chances[weak], agreement, row_id)

    def health(self) -> GetRouterHealthResponse:
        """The health of every head in use, by this gateway's requests."""
        routers = [_health_message(by, monitor.health) for by, monitor in self._monitors.items()]
        name = self._gateway_id
        return GetRouterHealthResponse(routers=routers, gateway=name, gateways=[name])

    def _retire(self, by: HeadKey, health: HeadHealth) -> None:
        for signal in health.drifted:
            self._event(by, health, signal, DRIFT_CHANGE_RETIRED)

    def _report(self, by: HeadKey, monitor: HeadMonitor, change: Change | None) -> None:
        if change is not None:
            kind = DRIFT_CHANGE_BEGAN if change.began else DRIFT_CHANGE_ENDED
            self._event(by, monitor.health, change.signal, kind)

    def _event(
        self, by: HeadKey, health: HeadHealth, signal: Signal, change: "DriftChange.ValueType"
    ) -> None:
        word = word_of(DriftChange, change)
        level = logging.WARNING if change == DRIFT_CHANGE_BEGAN else logging.INFO
        fields = " ".join(f"{name}={value}" for name, value in _log_fields(by, health, signal))
        _log.log(level, "router drift %s: %s", word, fields)
        self._events[*_labels(by), signal.value, word] += 1
        self._announce(
            RouterDriftEvent(
                gateway=self._gateway_id,
                event_time=timestamp(unix_ms()),
                signal=value_of(DriftSignal, signal.name),
                change=change,
                router=_health_message(by, health),
            )
        )

    def _values(self, gauge: Metric) -> Iterator[Point]:
        # The mapping is replaced as a whole, never changed: other threads may iterate over it.
        for by, monitor in self._monitors.items():
            value = _measures(monitor.health)[gauge]
            if value is not None:
                yield _labels(by), value


def _measures(health: HeadHealth) -> dict[Metric, float | None]:
    found = health.outcomes.found
    return {
        catalog.INPUT_DRIFT: health.inputs.index,
        catalog.ACCURACY_BIAS: None if found is None else found.bias,
        catalog.BRIER: None if found is None else found.brier,
    }


def _labels(by: HeadKey) -> tuple[str, str, str]:
    return by.policy, by.version, by.head


def _log_fields(by: HeadKey, health: HeadHealth, signal: Signal) -> Iterator[tuple[str, Any]]:
    """Fields of the log line about a drift of ``signal``."""
    yield from (("policy", by.policy), ("version", by.version), ("head", by.head))
    yield "signal", signal.value
    inputs, found = health.inputs, health.outcomes.found
    if signal is Signal.INPUTS and inputs.index is not None:
        yield from (("index", f"{inputs.index:.3f}"), ("limit", f"{inputs.limit:.3f}"))
        yield "rows", inputs.rows
    elif found is not None:
        yield from (("bias", f"{found.bias:+.3f}"), ("half_width", f"{found.half_width:.3f}"))
        yield "rows", found.rows


def _health_message(by: HeadKey, health: HeadHealth) -> RouterHealth:
    """The health of a head as the API returns it."""
    inputs, outcomes = health.inputs, health.outcomes
    accuracy = AccuracyDrift(state=_state(outcomes.state), rows=outcomes.rows)
    if outcomes.found is not None:
        accuracy.bias = outcomes.found.bias
        accuracy.half_width = outcomes.found.half_width
        accuracy.brier = outcomes.found.brier
    return RouterHealth(
        policy=by.policy,
        version=by.version,
        head=value_of(RouterHead, by.head),
        inputs=InputDrift(
            state=_state(inputs.state),
            rows=inputs.rows,
            stability_index=inputs.index,
            limit=inputs.limit,
        ),
        accuracy=accuracy,
    )


def _state(state: State) -> "DriftState.ValueType":
    return value_of(DriftState, state.name)
