"""Results of a run: the outcome of each request, and a summary by class.

The objectives of a class are written `interactive:ttft=0.5,latency=5`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from simulator.trace import Arrival, SimulationError
from sluice.wire.subjects import CLASSES


class Ending(Enum):
    """How a request ended."""

    FINISHED = "finished"
    EXPIRED = "expired"
    """Its deadline passed."""
    REFUSED = "refused"
    """The gateway's admission refused it at once."""
    OPEN = "open"
    """The simulation ended first."""


@dataclass(slots=True)
class RequestOutcome:
    """One request; times are seconds since the trace began, as its caller sees them.

    Attributes:
        wait_s: time in the batcher's queue, summed over all stays.
        expected_s: the duration that the gateway expected; None if unknown.
    """

    arrival: Arrival
    ending: Ending = Ending.OPEN
    wait_s: float = 0.0
    first_at: float | None = None
    ended_at: float | None = None
    expected_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_at is None else self.first_at - self.arrival.at_s

    @property
    def latency_s(self) -> float | None:
        """Seconds to the end of the answer."""
        if self.ending is not Ending.FINISHED or self.ended_at is None:
            return None
        return self.ended_at - self.arrival.at_s


@dataclass(slots=True)
class History:
    """One run of a simulation.

    Attributes:
        outcomes: one per request, in order of arrival.
        workers: number of workers.
        seconds: how long it ran.
        busy_s: time that workers computed, all together.
        slot_s: seconds times occupied slots, all workers together.
        cells: computed token positions, see `simulator.engines.StepProgress`.
        filled: computed positions that are no padding.
    """

    outcomes: list[RequestOutcome]
    workers: int
    slots: int
    seconds: float = 0.0
    busy_s: float = 0.0
    slot_s: float = 0.0
    batches: int = 0
    requests_sent: int = 0
    cells: int = 0
    filled: int = 0


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of a class: seconds to the first token and to the end of the answer; infinite: none."""

    ttft_s: float = math.inf
    latency_s: float = math.inf

    def met(self, outcome: RequestOutcome) -> bool:
        """Return whether a request met them."""
        ttft_s, latency_s = outcome.ttft_s, outcome.latency_s
        if ttft_s is None or latency_s is None:
            return False
        return ttft_s <= self.ttft_s and latency_s <= self.latency_s


DEFAULT_SLOS: Final[Mapping[str, Slo]] = {
    "interactive": Slo(ttft_s=0.5),
    "standard": Slo(ttft_s=5.0),
    "bulk": Slo(),
}
"""Objectives of classes for which none are given; bulk only has to end."""


def parse_slos(texts: Iterable[str]) -> dict[str, Slo]:
    """Return the objectives of all classes: `DEFAULT_SLOS` unless `texts` say otherwise.

    Raises:
        SimulationError: a text is malformed.
    """
    slos = dict(DEFAULT_SLOS)
    for text in texts:
        name, _, rest = text.partition(":")
        if name not in CLASSES:
            raise SimulationError(f"{text!r}: {name!r} is none of {', '.join(CLASSES)}")
        slos[name] = _parse_slo(text, rest)
    return slos


def _parse_slo(text: str, rest: str) -> Slo:
    try:
        pairs = (pair.split("=") for pair in rest.split(","))
        seconds = {f"{key}_s": float(value) for key, value in pairs}
        if not all(value > 0 for value in seconds.values()):
            raise ValueError(rest)
        return Slo(**seconds)
    except (TypeError, ValueError) as error:  # another key, or no number
        raise SimulationError(
            f"{text!r}: write CLASS:ttft=SECONDS,latency=SECONDS, one of the two is enough"
        ) from error


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of durations in seconds; None without a value."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class.

    Attributes:
        goodput_per_s: requests per second that met the objectives.
        within_slo: their share of all that arrived.
        longest_wait_s: longest time in the batcher's queue; shows starvation.
    """

    priority_class: str
    arrived: int
    finished: int
    expired: int
    refused: int
    open: int
    ttft_s: Percentiles
    latency_s: Percentiles
    goodput_per_s: float
    within_slo: float
    longest_wait_s: float
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A run.

    Attributes:
        padding_share: share of the computed positions that is padding, 0 to 1: prompts shorter than the
            longest of their batch, and sequences that ended before it. An engine that packs has none.
        utilization: share of the workers' time that they computed.
        occupancy: share of their slots that were taken, over their whole time.
        cost: price of the workers' time; None without a price.
        ttft_s: of all classes together.
        latency_s: of all classes together.
    """

    workers: int
    seconds: float
    classes: tuple[ClassSummary, ...]
    goodput_per_s: float
    within_slo: float
    tokens_per_s: float
    padding_share: float
    rows_per_batch: float
    utilization: float
    occupancy: float
    cost: float | None
    cost_per_million_tokens: float | None
    ttft_s: Percentiles
    latency_s: Percentiles


def summarize(
    history: History, slos: Mapping[str, Slo], worker_hour_price: float | None = None
) -> Summary:
    """Return the numbers of a run under the objectives of each class."""
    seconds = max(history.seconds, 1e-9)
    classes = tuple(
        _of_class(name, members, slos[name], seconds)
        for name in CLASSES
        if (members := [o for o in history.outcomes if o.arrival.priority_class == name])
    )
    tokens = sum(c.answer_tokens for c in classes)
    worker_s = history.workers * seconds
    cost = None if worker_hour_price is None else worker_hour_price * worker_s / 3600
    return Summary(
        workers=history.workers,
        seconds=history.seconds,
        classes=classes,
        goodput_per_s=sum(c.goodput_per_s for c in classes),
        within_slo=sum(c.within_slo * c.arrived for c in classes) / max(1, len(history.outcomes)),
        tokens_per_s=tokens / seconds,
        padding_share=1 - history.filled / history.cells if history.cells else 0.0,
        rows_per_batch=history.requests_sent / history.batches if history.batches else 0.0,
        utilization=history.busy_s / worker_s,
        occupancy=history.slot_s / (worker_s * history.slots),
        cost=cost,
        cost_per_million_tokens=None if cost is None or not tokens else cost / tokens * 1e6,
        ttft_s=percentiles(outcome.ttft_s for outcome in history.outcomes),
        latency_s=percentiles(outcome.latency_s for outcome in history.outcomes),
    )


def percentiles(values: Iterable[float | None]) -> Percentiles:
    """Return percentiles by nearest rank; values of None are left out."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Percentiles(None, None, None)
    ranks = (math.ceil(share * len(ordered)) for share in (0.5, 0.95, 0.99))
    return Percentiles(*(ordered[rank - 1] for rank in ranks))


def _of_class(
    name: str, members: Sequence[RequestOutcome], slo: Slo, seconds: float
) -> ClassSummary:
    endings = Counter(outcome.ending for outcome in members)
    met = sum(slo.met(outcome) for outcome in members)
    return ClassSummary(
        priority_class=name,
        arrived=len(members),
        finished=endings[Ending.FINISHED],
        expired=endings[Ending.EXPIRED],
        refused=endings[Ending.REFUSED],
        open=endings[Ending.OPEN],
        ttft_s=percentiles(outcome.ttft_s for outcome in members),
        latency_s=percentiles(outcome.latency_s for outcome in members),
        goodput_per_s=met / seconds,
        within_slo=met / len(members),
        longest_wait_s=max(outcome.wait_s for outcome in members),
        answer_tokens=sum(o.arrival.answer_tokens for o in members if o.ending is Ending.FINISHED),
    )
