"""Capacity planning: workers for a trace under objectives, or for a job of documents."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Final

from simulator.arrivals import LengthMix
from simulator.fleet import DEFAULT_SIZING, SHIPPED, Fleet, ProcessCost, Sizing, fleet, fleets
from simulator.results import Slo, Summary, summarize
from simulator.simulator import Setup, simulate
from simulator.trace import Arrival, SimulationError

SAMPLE_DOCUMENTS: Final = 2000
"""Documents of a job that are simulated to get the rate of a worker."""


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Number of workers that a trace needs.

    Attributes:
        workers: the fewest with which every class meets its objectives to the requested share.
        summary: of a run with them.
        one_less: of a run with one worker less; None if one is enough.
    """

    workers: int
    summary: Summary
    one_less: Summary | None


def plan_trace(
    trace: Sequence[Arrival],
    setup: Setup,
    slos: Mapping[str, Slo],
    *,
    share: float,
    workers_max: int,
    worker_hour_price: float | None = None,
) -> TracePlan:
    """Bisect over the number of workers; `Setup.workers` is ignored.

    Raises:
        SimulationError: not even `workers_max` are enough, or a request is longer than a worker's cache.
    """

    @cache
    def run(workers: int) -> Summary:
        history = simulate(trace, replace(setup, workers=workers))
        return summarize(history, slos, worker_hour_price)

    def is_enough(workers: int) -> bool:
        return all(summary.within_slo >= share for summary in run(workers).classes)

    # Double until it is enough: simulations of many workers take long.
    workers = 1
    while not is_enough(workers):
        if workers == workers_max:
            raise SimulationError(
                f"{workers_max} workers do not meet the SLOs for {share:.1%} of every class;"
                " an SLO may be shorter than an answer takes on an idle worker"
            )
        workers = min(2 * workers, workers_max)
    workers = 1 + bisect_left(range(1, workers), True, key=is_enough)
    return TracePlan(workers, run(workers), run(workers - 1) if workers > 1 else None)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Number of workers that a job of documents needs.

    Attributes:
        documents_per_s: needed rate.
        worker_documents_per_s: rate of one full worker.
        workers: with nothing to spare.
        fleet: all processes, workers too, with headroom and spread over zones.
    """

    documents: int
    hours: float
    documents_per_s: float
    worker_documents_per_s: float
    workers: int
    worker_hours: float
    cost: float | None
    fleet: tuple[Fleet, ...]


def plan_job(
    documents: int,
    hours: float,
    mix: LengthMix,
    setup: Setup,
    *,
    seed: int,
    sizing: Sizing = DEFAULT_SIZING,
    cost_error: float = 0.0,
    processes: Mapping[str, ProcessCost] = SHIPPED,
    worker_hour_price: float | None = None,
) -> JobPlan:
    """Plan with workers that are always full, as bulk work keeps them.

    Args:
        documents: how many there are.
        hours: time in which they must be done.
        mix: lengths of documents and answers.
        setup: policy, cost and limits of a worker.
        seed: of the drawn lengths.
        sizing: headroom and zones.
        cost_error: relative error of the cost of a step.
        processes: what a document costs the processes beside the workers.
        worker_hour_price: price of a worker for an hour.

    Raises:
        SimulationError: a document is longer than a worker's cache.
    """
    rng, trace = Random(seed), []
    for _ in range(SAMPLE_DOCUMENTS):
        prompt, answer = mix.prompt.draw(rng), mix.answer.draw(rng)
        trace.append(Arrival(0.0, prompt, answer, answer, "bulk"))
    mean_answer = statistics.mean(arrival.answer_tokens for arrival in trace)
    rate = _full_rate(trace, setup)
    needed, worker_hours = documents / (hours * 3600), documents / rate / 3600
    return JobPlan(
        documents=documents,
        hours=hours,
        documents_per_s=needed,
        worker_documents_per_s=rate,
        workers=math.ceil(needed / rate),
        worker_hours=worker_hours,
        cost=None if worker_hour_price is None else worker_hours * worker_hour_price,
        fleet=(
            *fleets(needed, mean_answer, sizing, processes),
            fleet("worker", needed / rate, cost_error, sizing),
        ),
    )


def _full_rate(trace: Sequence[Arrival], setup: Setup) -> float:
    """Return the documents per second of one worker with a backlog, between 10 and 80 % of it."""
    history = simulate(trace, replace(setup, workers=1, admission=False, until_s=None))
    ends = sorted(outcome.ended_at for outcome in history.outcomes if outcome.ended_at)
    first, last = len(ends) // 10, len(ends) * 8 // 10
    return (last - first) / (ends[last] - ends[first])
