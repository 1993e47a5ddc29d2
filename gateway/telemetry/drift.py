"""Drift of the learned routers in use: when one begins and when it is over; logs, counts and publishes it.

Two signals of each head, over windows of fixed size: *inputs* compares the gains that it predicts with those of its
held-out rows, *accuracy* the chances that it predicted with the outcomes. Each measure is compared with a limit that
chance alone stays below. A signal drifts above the limit and recovers only below `CLEAR` of it, so a measure near the
limit is reported once.

The event loop owns the monitors. Metrics are read on other threads, which read single values only.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import log, sqrt
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.routing.plan import CASCADE, Plan
from gateway.routing.prediction import PROMPT, HeadKey, Prediction
from sluice.settings.routing import DriftSettings
from sluice.telemetry import catalog
from sluice.telemetry.catalog import Metric
from sluice.telemetry.registry import MetricRegistry, Point
from sluice.v1.admin_pb2 import (
    DRIFT_CHANGE_BEGAN,
    DRIFT_CHANGE_ENDED,
    DRIFT_CHANGE_RETIRED,
    DRIFT_SIGNAL_ACCURACY,
    DRIFT_SIGNAL_INPUTS,
    DRIFT_STATE_DRIFTED,
    DRIFT_STATE_GATHERING,
    DRIFT_STATE_STABLE,
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

CLEAR: Final = 0.6
"""Of the limit; below it a drift is over."""
CHANCE: Final = 0.9999
"""Share of windows of unchanged traffic that stay below the limit, where `stability_max` is too low for that."""
BINS: Final = 10
BLUR: Final = 0.05
"""What of a gain is noise. Held-out rows were predicted by routers that learned from fewer rows than the one in use:
where prompts resemble each other all gains are within a hair, and fall on this or that side of a bin's edge."""
_SHARE_MIN: Final = 1e-4
"""Empty bins count as nearly empty, since their logarithm would be infinite."""


class Reference:
    """Gains that others are compared with, in its deciles; at least one.

    Attributes:
        rows: how many.
    """

    def __init__(self, scores: NDArray[Any]) -> None:
        self.rows = len(scores)
        self._inner = np.unique(np.quantile(scores, np.linspace(0, 1, BINS + 1)[1:-1]))
        self._before = self._shares(scores)

    def stability_index(self, recent: NDArray[Any]) -> float:
        """Population stability index of ``recent``, at least one score.

        0 for equal distributions; by custom up to 0.1 is stable and above 0.25 has shifted.
        """
        now = self._shares(recent)
        return float(((now - self._before) * np.log(now / self._before)).sum())

    def chance_index(self, rows: int, confidence: float) -> float:
        """What the index of ``rows`` scores of the very same source stays below with ``confidence``.

        Times rows * others / (rows + others) it is distributed as chi-squared, nearly (Yurdakul, Naranjo 2020), with
        one degree of freedom less than bins; the quantile is Wilson and Hilferty's.
        """
        freedom = max(1, len(self._inner))
        spread = 2 / (9 * freedom)
        quantile = freedom * (1 - spread + NormalDist().inv_cdf(confidence) * sqrt(spread)) ** 3
        return quantile * (1 / rows + 1 / self.rows)

    def _shares(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Of each bin, a score counting for all bins within `BLUR` of it."""
        parts = (self._inner[:, None] - scores) / (2 * BLUR) + 0.5
        below = np.clip(parts, 0, 1).mean(axis=1)
        shares: NDArray[np.float64] = np.diff(below, prepend=0.0, append=1.0)
        return np.maximum(shares, _SHARE_MIN)


def accuracy(
    predicted: Sequence[float],
    outcomes: Sequence[float],
    confidence: float,
    learned_rows: int,
) -> AccuracyDrift:
    """Compares predicted chances with outcomes, both in [0, 1], one pair a row and at least one; without a state.

    The true bias is within the half width with ``confidence`` (Hoeffding: for any distribution). The predictions were
    calibrated on ``learned_rows`` outcomes, which are known no better than by chance either.
    """
    assert len(predicted) == len(outcomes) > 0
    errors = np.asarray(outcomes, np.float64) - np.asarray(predicted, np.float64)
    # The difference of two means; an error given its prediction spans a range of 1.
    half_width = sqrt(log(2 / (1 - confidence)) / 2 * (1 / len(errors) + 1 / learned_rows))
    brier = float((errors**2).mean())
    return AccuracyDrift(
        rows=len(errors), bias=float(errors.mean()), half_width=half_width, brier=brier
    )


class Change(NamedTuple):
    """A drift begins, is over, or its router goes."""

    signal: "DriftSignal.ValueType"
    change: "DriftChange.ValueType"


class _Latch:
    """The state of one signal."""

    def __init__(self, signal: "DriftSignal.ValueType") -> None:
        self._signal = signal
        self.state: DriftState.ValueType = DRIFT_STATE_GATHERING

    def judge(self, share: float) -> Change | None:
        """The measure is at ``share`` of its limit."""
        before = self.state
        if share > 1:
            self.state = DRIFT_STATE_DRIFTED
        elif before != DRIFT_STATE_DRIFTED or share < CLEAR:
            self.state = DRIFT_STATE_STABLE
        if DRIFT_STATE_DRIFTED not in (before, self.state) or before == self.state:
            return None
        began = self.state == DRIFT_STATE_DRIFTED
        return Change(self._signal, DRIFT_CHANGE_BEGAN if began else DRIFT_CHANGE_ENDED)


class HeadMonitor:
    """One head of one artefact.

    Args:
        held_out: the gains that it predicted for its held-out rows.
    """

    def __init__(self, by: HeadKey, held_out: NDArray[Any], settings: DriftSettings) -> None:
        self._by = by
        self._reference = Reference(held_out)
        self._settings = settings
        self._gains = np.zeros(settings.window, np.float32)
        self._predictions = 0
        self._index: float | None = None
        self._limit = settings.stability_max
        self._inputs = _Latch(DRIFT_SIGNAL_INPUTS)
        self._outcomes: dict[str, tuple[float, float]] = {}
        self._unnamed = 0
        self._found = AccuracyDrift()
        self._accuracy = _Latch(DRIFT_SIGNAL_ACCURACY)

    def predicted(self, gain: float) -> Change | None:
        """Adds a ``gain`` that the head predicted for a request."""
        settings = self._settings
        self._gains[self._predictions % settings.window] = gain
        self._predictions += 1
        if self._predictions < settings.min_rows or self._predictions % settings.judge_every:
            return None
        self._limit = max(settings.stability_max, self._reference.chance_index(self._rows, CHANCE))
        self._index = self._reference.stability_index(self._gains[: self._rows])
        return self._inputs.judge(self._index / self._limit)

    def observed(self, chance: float, outcome: float, request_id: str = "") -> Change | None:
        """Adds an ``outcome`` with the ``chance`` that the head had predicted, both 0 to 1.

        A later outcome of the same ``request_id`` replaces an earlier one; without one each counts.
        """
        if not request_id:
            self._unnamed += 1
            request_id = f"#{self._unnamed}"
        self._outcomes[request_id] = (chance, outcome)
        if len(self._outcomes) > self._settings.window:
            del self._outcomes[next(iter(self._outcomes))]
        predicted, outcomes = zip(*self._outcomes.values(), strict=True)
        confidence, learned = self._settings.confidence, self._reference.rows
        self._found = found = accuracy(predicted, outcomes, confidence, learned)
        if found.rows < self._settings.min_outcomes:
            return None
        return self._accuracy.judge(abs(found.bias) / found.half_width)

    @property
    def health(self) -> RouterHealth:
        """The last computed health."""
        found = AccuracyDrift(state=self._accuracy.state)
        found.MergeFrom(self._found)
        return RouterHealth(
            policy=self._by.policy,
            version=self._by.version,
            head=value_of(RouterHead, self._by.head),
            inputs=InputDrift(
                state=self._inputs.state,
                rows=self._rows,
                stability_index=self._index,
                limit=self._limit,
            ),
            accuracy=found,
        )

    @property
    def _rows(self) -> int:
        return min(self._predictions, self._settings.window)


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
            monitors[by] = old if old and same else HeadMonitor(by, gains, settings)
        for by, monitor in self._monitors.items():
            if monitors.get(by) is not monitor:
                for signal in drifted(monitor.health):
                    self._report(monitor, Change(signal, DRIFT_CHANGE_RETIRED))
        self._monitors, self._held_out, self._settings = monitors, held_out, settings

    def scored(self, score: Prediction) -> None:
        """A head predicted something for a request."""
        monitor = self._monitors.get(score.by)
        if monitor is not None:
            self._report(monitor, monitor.predicted(score.gain))

    def observed(self, by: HeadKey, chance: float, outcome: float, request_id: str = "") -> None:
        """The outcome, 0 to 1, of what ``by`` predicted with ``chance``; ignored when that head is not in use any more.

        A later outcome of the same request replaces an earlier one; without ``request_id`` each counts.
        """
        monitor = self._monitors.get(by)
        if monitor is not None:
            self._report(monitor, monitor.observed(chance, outcome, request_id))

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
        routers = [monitor.health for monitor in self._monitors.values()]
        name = self._gateway_id
        return GetRouterHealthResponse(routers=routers, gateway=name, gateways=[name])

    def _report(self, monitor: HeadMonitor, said: Change | None) -> None:
        if said is None:
            return
        health, word = monitor.health, word_of(DriftChange, said.change)
        level = logging.WARNING if said.change == DRIFT_CHANGE_BEGAN else logging.INFO
        signal = word_of(DriftSignal, said.signal)
        policy, version, head = labels = _labels(health)
        _log.log(
            level,
            "router drift %s: policy=%s version=%s head=%s signal=%s %s",
            *(word, policy, version, head, signal, _measured(health, said.signal)),
        )
        self._events[*labels, signal, word] += 1
        self._announce(
            RouterDriftEvent(
                gateway=self._gateway_id,
                event_time=timestamp(unix_ms()),
                signal=said.signal,
                change=said.change,
                router=health,
            )
        )

    def _values(self, gauge: Metric) -> Iterator[Point]:
        # The mapping is replaced as a whole, never changed: other threads may iterate over it.
        for monitor in self._monitors.values():
            health = monitor.health
            value = _measures(health)[gauge]
            if value is not None:
                yield _labels(health), value


def drifted(health: RouterHealth) -> "list[DriftSignal.ValueType]":
    """The signals that have drifted."""
    states = {
        DRIFT_SIGNAL_INPUTS: health.inputs.state,
        DRIFT_SIGNAL_ACCURACY: health.accuracy.state,
    }
    return [signal for signal, state in states.items() if state == DRIFT_STATE_DRIFTED]


def _measures(health: RouterHealth) -> dict[Metric, float | None]:
    inputs, found = health.inputs, health.accuracy
    return {
        catalog.INPUT_DRIFT: inputs.stability_index if inputs.HasField("stability_index") else None,
        catalog.ACCURACY_BIAS: found.bias if found.rows else None,
        catalog.BRIER: found.brier if found.rows else None,
    }


def _labels(health: RouterHealth) -> tuple[str, str, str]:
    return health.policy, health.version, word_of(RouterHead, health.head)


def _measured(health: RouterHealth, signal: "DriftSignal.ValueType") -> str:
    """What a line of the log says about a drift of ``signal``."""
    inputs, found = health.inputs, health.accuracy
    if signal == DRIFT_SIGNAL_INPUTS:
        return f"index={inputs.stability_index:.3f} limit={inputs.limit:.3f} rows={inputs.rows}"
    return f"bias={found.bias:+.3f} half_width={found.half_width:.3f} rows={found.rows}"
