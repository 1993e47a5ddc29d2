"""Numbers out of a run: latencies by class, goodput, padding, utilization, starvation, cost."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simulator.outcome import Ending, History, Outcome
from simulator.slo import Slo
from sluice.wire.subjects import CLASSES


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of seconds; None without a value."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class.

    Attributes:
        goodput_per_s: requests that kept the promise, a second.
        within_slo: their share of all that arrived.
        longest_wait_s: in the batcher's queue, over all requests of the class: how far it starved.
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
        padding_share: of the prompts in the batches that were formed, if each is as long as the longest: 0 to 1.
        utilization: share of the workers' time that they computed.
        occupancy: share of their slots that were taken, over their whole time.
        cost: price of the workers' time; None without a price.
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


def summarize(
    history: History, slos: Mapping[str, Slo], worker_hour_price: float | None = None
) -> Summary:
    """The numbers of a run under the promises of each class."""
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
        rows_per_batch=history.rows_sent / history.batches if history.batches else 0.0,
        utilization=history.busy_s / worker_s,
        occupancy=history.row_s / (worker_s * history.slots),
        cost=cost,
        cost_per_million_tokens=None if cost is None or not tokens else cost / tokens * 1e6,
    )


def percentiles(values: Iterable[float]) -> Percentiles:
    """Nearest rank."""
    ordered = sorted(values)
    return Percentiles(*(_rank(ordered, share) for share in (0.5, 0.95, 0.99)))


def _rank(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _of_class(name: str, members: Sequence[Outcome], slo: Slo, seconds: float) -> ClassSummary:
    def count(ending: Ending) -> int:
        return sum(outcome.ending is ending for outcome in members)

    met = sum(slo.met(outcome) for outcome in members)
    return ClassSummary(
        priority_class=name,
        arrived=len(members),
        finished=count(Ending.FINISHED),
        expired=count(Ending.EXPIRED),
        refused=count(Ending.REFUSED),
        open=count(Ending.OPEN),
        ttft_s=percentiles(o.ttft_s for o in members if o.ttft_s is not None),
        latency_s=percentiles(o.latency_s for o in members if o.latency_s is not None),
        goodput_per_s=met / seconds,
        within_slo=met / len(members),
        longest_wait_s=max(outcome.wait_s for outcome in members),
        answer_tokens=sum(o.arrival.answer_tokens for o in members if o.ending is Ending.FINISHED),
    )
