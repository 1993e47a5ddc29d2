"""Watches the learned routers in force: feeds their monitors, and tells operators when one drifts.

The gateway's loop owns the monitors. Metrics are read on other threads, which look at single values only.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.util.types import AttributeValue

from gateway.routing import plan as strategies
from gateway.routing.learned.monitor import Change, Health, Monitor, Signal, State
from gateway.routing.plan import Plan
from gateway.routing.prediction import PROMPT, HeadKey, HeadScore
from sluice.settings.routing import DriftSettings
from sluice.telemetry import names
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
from sluice.v1.inference_pb2 import RouteStrategy
from sluice.wire.clock import timestamp, unix_ms
from sluice.wire.enums import value_of, word_of

_log = logging.getLogger(__name__)

Announce = Callable[[RouterDriftEvent], None]
HeldOut = Mapping[HeadKey, NDArray[np.float32]]
"""See `gateway.routing.router.Router.held_out`."""

_WATCHED: Final = frozenset({strategies.CASCADE, strategies.SPECULATIVE})
"""Strategies that keep an answer for what it says."""
_WORDS: Final[Mapping[int, str]] = {
    DRIFT_CHANGE_BEGAN: "began",
    DRIFT_CHANGE_ENDED: "ended",
    DRIFT_CHANGE_RETIRED: "retired",
}


class DriftMonitor:
    """One monitor for each head in use.

    Args:
        announce: sends an event to operators; must not wait.
    """

    def __init__(self, gateway_id: str, announce: Announce, meter: Meter) -> None:
        self._gateway_id = gateway_id
        self._announce = announce
        self._settings = DriftSettings()
        self._held_out: HeldOut = {}
        self._monitors: Mapping[HeadKey, Monitor] = {}
        self._events = meter.create_counter(
            names.METRIC_DRIFT_EVENTS, "{event}", "Drifts of learned routers that began or ended."
        )
        meter.create_observable_gauge(
            names.METRIC_INPUT_DRIFT,
            [self._indices],
            "",
            "Population stability index of predicted gains against those of held-out outcomes.",
        )
        meter.create_observable_gauge(
            names.METRIC_ACCURACY_BIAS,
            [self._biases],
            "",
            "Mean of outcome less predicted chance; below 0 the router is too optimistic.",
        )
        meter.create_observable_gauge(
            names.METRIC_BRIER,
            [self._briers],
            "",
            "Mean squared difference of outcome and predicted chance.",
        )

    def use(self, held_out: HeldOut, settings: DriftSettings) -> None:
        """These heads are in force from now on; those that are so already go on with what they have seen."""
        kept = {
            by: self._monitors[by]
            for by, gains in held_out.items()
            if settings == self._settings
            and by in self._monitors
            and np.array_equal(gains, self._held_out[by])
        }
        for by, monitor in self._monitors.items():
            if by not in kept:
                self._retire(by, monitor.health)
        new = {by: Monitor(gains, settings) for by, gains in held_out.items() if by not in kept}
        self._monitors = {by: kept.get(by) or new[by] for by in held_out}
        self._held_out, self._settings = held_out, settings

    def scored(self, score: HeadScore) -> None:
        """A head predicted something for a request."""
        monitor = self._monitors.get(score.by)
        if monitor is not None:
            self._tell(score.by, monitor, monitor.predicted(score.gain))

    def observed(self, by: HeadKey, chance: float, outcome: float, request_id: str = "") -> bool:
        """A chance that the head ``by`` predicted came out as ``outcome``, both 0 to 1.

        A later outcome of the same request replaces an earlier one; without ``request_id`` each counts. False: the head
        is not in use any more.
        """
        monitor = self._monitors.get(by)
        if monitor is None:
            return False
        self._tell(by, monitor, monitor.observed(chance, outcome, request_id))
        return True

    def graded(self, record: RequestRecord, grade: float) -> None:
        """A caller graded the answer of a request, 0 to 1; held against what was predicted for the model that gave it.

        The head that was asked last counts. In a cascade the prompt head does not: whether its small model's answer
        was kept depends on that answer, so those that were kept are better than what it predicted for all.
        """
        scores, models = (
            record.route.scores,
            [one.model for one in record.attempts if not one.unused_reason],
        )
        if not scores or not models or record.error_reason:
            return
        last, model = scores[-1], models[-1]
        by = HeadKey(last.policy, last.version, word_of(RouterHead, last.head))
        if by.head == PROMPT and word_of(RouteStrategy, record.route.strategy) in _WATCHED:
            return
        if model in last.chances:
            self.observed(by, last.chances[model], grade, record.request_id)

    def compared(self, plan: Plan, weak: str, agreement: float, row_id: str) -> None:
        """A shadow told how far ``weak`` agrees with the strong model; counts where the settings say so.

        Not in a cascade, for the reason given at `graded`.
        """
        prompt = next((score for score in plan.scores if score.by.head == PROMPT), None)
        if not self._settings.shadows or prompt is None or plan.strategy in _WATCHED:
            return
        if weak in prompt.chances:
            self.observed(prompt.by, prompt.chances[weak], agreement, row_id)

    def health(self) -> GetRouterHealthResponse:
        """Of every head in use."""
        routers = [_health_message(by, monitor.health) for by, monitor in self._monitors.items()]
        return GetRouterHealthResponse(routers=routers, gateway=self._gateway_id)

    def _retire(self, by: HeadKey, health: Health) -> None:
        for signal in health.drifted:
            self._event(by, health, signal, DRIFT_CHANGE_RETIRED)

    def _tell(self, by: HeadKey, monitor: Monitor, change: Change | None) -> None:
        if change is not None:
            kind = DRIFT_CHANGE_BEGAN if change.began else DRIFT_CHANGE_ENDED
            self._event(by, monitor.health, change.signal, kind)

    def _event(
        self, by: HeadKey, health: Health, signal: Signal, change: "DriftChange.ValueType"
    ) -> None:
        word = _WORDS[change]
        level = logging.WARNING if change == DRIFT_CHANGE_BEGAN else logging.INFO
        said = " ".join(f"{name}={value}" for name, value in _log_fields(by, health, signal))
        _log.log(level, "router drift %s: %s", word, said)
        told = {names.DRIFT_SIGNAL: signal.value, names.DRIFT_CHANGE: word}
        self._events.add(1, {**_attributes(by), **told})
        self._announce(
            RouterDriftEvent(
                gateway=self._gateway_id,
                event_time=timestamp(unix_ms()),
                signal=value_of(DriftSignal, signal.name),
                change=change,
                router=_health_message(by, health),
            )
        )

    def _indices(self, options: CallbackOptions) -> Iterable[Observation]:
        for by, health in self._seen():
            if health.inputs.index is not None:
                yield Observation(health.inputs.index, _attributes(by))

    def _biases(self, options: CallbackOptions) -> Iterable[Observation]:
        for by, health in self._seen():
            if health.outcomes.found is not None:
                yield Observation(health.outcomes.found.bias, _attributes(by))

    def _briers(self, options: CallbackOptions) -> Iterable[Observation]:
        for by, health in self._seen():
            if health.outcomes.found is not None:
                yield Observation(health.outcomes.found.brier, _attributes(by))

    def _seen(self) -> Iterator[tuple[HeadKey, Health]]:
        # The mapping is replaced as a whole, never changed: other threads may walk it.
        return ((by, monitor.health) for by, monitor in self._monitors.items())


def _attributes(by: HeadKey) -> dict[str, AttributeValue]:
    """Labels of metrics."""
    return {
        names.ROUTER_POLICY: by.policy,
        names.ROUTER_VERSION: by.version,
        names.ROUTER_HEAD: by.head,
    }


def _log_fields(by: HeadKey, health: Health, signal: Signal) -> Iterator[tuple[str, Any]]:
    """What a line of the log says of a drift of ``signal``."""
    yield from (("policy", by.policy), ("version", by.version), ("head", by.head))
    yield "signal", signal.value
    inputs, found = health.inputs, health.outcomes.found
    if signal is Signal.INPUTS and inputs.index is not None:
        yield from (("index", f"{inputs.index:.3f}"), ("limit", f"{inputs.limit:.3f}"))
        yield "rows", inputs.rows
    elif found is not None:
        yield from (("bias", f"{found.bias:+.3f}"), ("half_width", f"{found.half_width:.3f}"))
        yield "rows", found.rows


def _health_message(by: HeadKey, health: Health) -> RouterHealth:
    """What callers of the API see."""
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
