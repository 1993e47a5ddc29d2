"""Watches the learned routers in use for drift: as metrics, and for `GetRouterHealth`.

Each head has two signals, over windows of fixed size. *Inputs* compares the gains that it predicts with those of its
held-out rows, *accuracy* the chances that it predicted with the outcomes. Each measure is compared with a limit that
chance alone stays below.

The event loop owns the windows. Readers, on whatever thread, compute the measures of what is in them.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import log, sqrt
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.model import HeadKey
from sluice.settings.routing import DriftRules
from sluice.telemetry.instruments import Instruments, Point
from sluice.v1 import admin_pb2 as pb
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_CASCADE
from sluice.wire.enums import word_of

CHANCE: Final = 0.9999
"""Share of windows of unchanged traffic that stay below the limit, where `stability_max` is too low for that."""
BINS: Final = 10
"""Bins of the stability index: deciles, by custom."""
BLUR: Final = 0.05
"""The part of a gain that is noise. Held-out rows were predicted by routers that learned from fewer rows than the one
in use: where prompts resemble each other, gains differ by little and fall on either side of the edge of a bin."""
_SHARE_MIN: Final = 1e-4
"""Least share of a bin: the logarithm of an empty one would be infinite."""


class Reference:
    """Gains that others are compared with, in bins of equal shares.

    Attributes:
        rows: The number of gains.
    """

    def __init__(self, scores: NDArray[Any]) -> None:
        """Compare with `scores`, of which there is at least one."""
        self.rows = len(scores)
        self._inner = np.unique(np.quantile(scores, np.linspace(0, 1, BINS + 1)[1:-1]))
        self._before = self._shares(scores)

    def stability_index(self, recent: NDArray[Any]) -> float:
        """Return the population stability index of `recent`, which has at least one score.

        0 for equal distributions; by custom up to 0.1 is stable and above 0.25 has shifted.
        """
        now = self._shares(recent)
        return float(((now - self._before) * np.log(now / self._before)).sum())

    def chance_index(self, rows: int, confidence: float) -> float:
        """Return the limit that the index of `rows` scores of the same source stays below with `confidence`.

        Times rows * others / (rows + others) the index is nearly distributed as chi-squared (Yurdakul, Naranjo 2020),
        with one degree of freedom less than bins; the quantile is that of Wilson and Hilferty.
        """
        freedom = max(1, len(self._inner))
        spread = 2 / (9 * freedom)
        quantile = freedom * (1 - spread + NormalDist().inv_cdf(confidence) * sqrt(spread)) ** 3
        return quantile * (1 / rows + 1 / self.rows)

    def _shares(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Return the share of each bin; a score counts for all bins within `BLUR` of it."""
        parts = (self._inner[:, None] - scores) / (2 * BLUR) + 0.5
        below = np.clip(parts, 0, 1).mean(axis=1)
        shares: NDArray[np.float64] = np.diff(below, prepend=0.0, append=1.0)
        return np.maximum(shares, _SHARE_MIN)


def accuracy(
    predicted: Sequence[float],
    outcomes: Sequence[float],
    confidence: float,
    learned_rows: int,
) -> pb.AccuracyDrift:
    """Compare predicted chances with outcomes, and return the drift without a state.

    The true bias is within the half width with `confidence` (Hoeffding: for any distribution). The predictions were
    calibrated on `learned_rows` outcomes, which are a sample too.

    Args:
        predicted: Chances in [0, 1], at least one.
        outcomes: Outcomes in [0, 1], one for each chance.
        confidence: Probability that the true bias is within the half width.
        learned_rows: Rows that the head learned from.
    """
    assert len(predicted) == len(outcomes) > 0
    errors = np.asarray(outcomes, np.float64) - np.asarray(predicted, np.float64)
    # The difference of two means; an error given its prediction spans a range of 1.
    half_width = sqrt(log(2 / (1 - confidence)) / 2 * (1 / len(errors) + 1 / learned_rows))
    brier = float((errors**2).mean())
    return pb.AccuracyDrift(
        rows=len(errors), bias=float(errors.mean()), half_width=half_width, brier=brier
    )


class HeadMonitor:
    """Watches one head of one artefact.

    Attributes:
        held_out: The gains that it predicted for its held-out rows.
    """

    def __init__(self, key: HeadKey, held_out: NDArray[Any], rules: DriftRules) -> None:
        """Begin with empty windows."""
        self._key, self.held_out = key, held_out
        self._reference = Reference(held_out)
        self._rules = rules
        self._gains = deque[float](maxlen=rules.window)
        self._outcomes: dict[str, tuple[float, float]] = {}

    def predicted(self, gain: float) -> None:
        """Add a `gain` that the head predicted for a request."""
        self._gains.append(gain)

    def observed(self, chance: float, outcome: float, request_id: str) -> None:
        """Add an `outcome` with the `chance` that the head had predicted, both 0 to 1.

        A later outcome of the same `request_id` replaces an earlier one.
        """
        self._outcomes[request_id] = (chance, outcome)
        if len(self._outcomes) > self._rules.window:
            del self._outcomes[next(iter(self._outcomes))]

    @property
    def health(self) -> pb.RouterHealth:
        """The drift of the head."""
        return pb.RouterHealth(
            **self._key._asdict(),
            inputs=self._inputs(list(self._gains)),
            accuracy=self._accuracy(list(self._outcomes.values())),
        )

    def _inputs(self, gains: Sequence[float]) -> pb.InputDrift:
        drift = pb.InputDrift(
            state=pb.DRIFT_STATE_GATHERING, rows=len(gains), limit=self._rules.stability_max
        )
        if drift.rows >= self._rules.min_predictions:
            drift.limit = max(drift.limit, self._reference.chance_index(drift.rows, CHANCE))
            drift.stability_index = self._reference.stability_index(np.asarray(gains))
            drift.state = _state(drift.stability_index > drift.limit)
        return drift

    def _accuracy(self, pairs: Sequence[tuple[float, float]]) -> pb.AccuracyDrift:
        if not pairs:
            return pb.AccuracyDrift(state=pb.DRIFT_STATE_GATHERING)
        predicted, outcomes = zip(*pairs, strict=True)
        drift = accuracy(predicted, outcomes, self._rules.confidence, self._reference.rows)
        enough = drift.rows >= self._rules.min_outcomes
        drift.state = (
            _state(abs(drift.bias) > drift.half_width) if enough else pb.DRIFT_STATE_GATHERING
        )
        return drift


HeldOut = Mapping[HeadKey, NDArray[np.float32]]
"""See `gateway.routing.router.Router.held_out`."""

_GAUGES: Final = (
    "sluice.router.input_drift",
    "sluice.router.accuracy_bias",
    "sluice.router.brier",
    "sluice.router.drifted",
)


class DriftMonitor:
    """Watches the heads of the learned routers in use."""

    def __init__(self, gateway_id: str, instruments: Instruments) -> None:
        """Show the drift of all heads as metrics of `instruments`."""
        self._gateway_id = gateway_id
        self._rules = DriftRules()
        self._monitors: Mapping[HeadKey, HeadMonitor] = {}
        for gauge in _GAUGES:
            instruments.observe(gauge, partial(self._values, gauge))

    def use(self, held_out: HeldOut, rules: DriftRules) -> None:
        """Monitor these heads by `rules` from now on; the windows of those that have not changed stay."""
        monitors = {}
        for key, gains in held_out.items():
            old = self._monitors.get(key)
            is_same = old and rules == self._rules and np.array_equal(gains, old.held_out)
            monitors[key] = old if old and is_same else HeadMonitor(key, gains, rules)
        self._monitors, self._rules = monitors, rules

    def scored(self, score: pb.RouterScore) -> None:
        """Take a prediction of a head for a request."""
        monitor = self._monitors.get(_key_of(score))
        if monitor is not None:
            monitor.predicted(score.gain)

    def observed(self, score: pb.RouterScore, model: str, outcome: float, request_id: str) -> None:
        """Take the outcome, 0 to 1, of what was predicted for `model`.

        It is ignored if nothing was predicted, or if that head is not in use any more. A later outcome of the same
        request replaces an earlier one.
        """
        monitor = self._monitors.get(_key_of(score))
        if monitor is not None and model in score.chances:
            monitor.observed(score.chances[model], outcome, request_id)

    def graded(self, record: pb.RequestRecord, grade: float) -> None:
        """Take a caller's grade of an answer, 0 to 1: the outcome of what was predicted for the model that gave it.

        It counts for the head that predicted last, but in a cascade not for the prompt head: a small model's answer is
        shown because it looks good, so the shown ones are better than the prediction for all.
        """
        scores = record.route.scores
        models = [attempt.model for attempt in record.attempts]
        if not scores or not models or record.error_reason:
            return
        score, cascade = scores[-1], record.route.strategy == ROUTE_STRATEGY_CASCADE
        if score.head != pb.ROUTER_HEAD_PROMPT or not cascade:
            self.observed(score, models[-1], grade, record.request_id)

    def health(self) -> pb.GetRouterHealthResponse:
        """Return the drift of every head in use, by this gateway's requests."""
        routers = [monitor.health for monitor in self._monitors.values()]
        name = self._gateway_id
        return pb.GetRouterHealthResponse(routers=routers, gateway=name, gateways=[name])

    def _values(self, gauge: str) -> Iterator[Point]:
        # The mapping is replaced as a whole, never changed: other threads may iterate over it.
        for monitor in self._monitors.values():
            health = monitor.health
            inputs, accuracy = health.inputs, health.accuracy
            labels = health.policy, health.version, word_of(pb.RouterHead, health.head)
            if gauge == "sluice.router.drifted":
                yield (*labels, "inputs"), float(inputs.state == pb.DRIFT_STATE_DRIFTED)
                yield (*labels, "accuracy"), float(accuracy.state == pb.DRIFT_STATE_DRIFTED)
            elif gauge == "sluice.router.input_drift":
                if inputs.HasField("stability_index"):
                    yield labels, inputs.stability_index
            elif accuracy.rows:
                is_bias = gauge == "sluice.router.accuracy_bias"
                yield labels, accuracy.bias if is_bias else accuracy.brier


def _key_of(score: pb.RouterScore) -> HeadKey:
    return HeadKey(score.policy, score.version, score.head)


def _state(drifted: bool) -> "pb.DriftState.ValueType":
    return pb.DRIFT_STATE_DRIFTED if drifted else pb.DRIFT_STATE_STABLE
