"""Capacity planning: workers for a trace under objectives, or for a job of documents."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from simulator.arrivals import LengthMix
from simulator.cost import StepCost
from simulator.engines import EngineLimits
from simulator.fleet import DEFAULT_SIZING, SHIPPED, Fleet, ProcessCost, Sizing, fleet, fleets
from simulator.results import Ending, Slo, Summary, summarize
from simulator.simulator import Setup, simulate
from simulator.trace import Arrival, SimulationError

SAMPLE_DOCUMENTS: Final = 2000
"""Documents of a job that are simulated to check the computed rate."""
MEAN_DRAWS: Final = 20_000


@dataclass(frozen=True, slots=True)
class TracePlan:
    """How many workers a trace needs.

    Attributes:
        workers: the fewest with which every class meets its objectives to the share asked for.
        summary: of a run with them.
        one_less: of a run with one worker less; None when one is enough.
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
    """Bisects over the number of workers; `Setup.workers` does not matter.

    Raises:
        SimulationError: not even ``workers_max`` are enough.
    """

    def run(workers: int) -> Summary:
        history = simulate(trace, replace(setup, workers=workers))
        return summarize(history, slos, worker_hour_price)

    found = _fewest(run, lambda summary: _kept(summary, share), workers_max)
    if found is None:
        raise SimulationError(
            f"{workers_max} workers do not meet the SLOs for {share:.1%} of every class;"
            " an SLO may be shorter than an answer takes on an idle worker"
        )
    return TracePlan(found, run(found), run(found - 1) if found > 1 else None)


def _kept(summary: Summary, share: float) -> bool:
    return all(c.within_slo >= share for c in summary.classes)


def _fewest(
    run: Callable[[int], Summary], enough: Callable[[Summary], bool], most: int
) -> int | None:
    low, high = 0, 1
    while not enough(run(high)):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(run(middle)):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class JobPlan:
    """How many workers a job of documents needs.

    Attributes:
        documents_per_s: what is needed.
        worker_documents_per_s: of one full worker, computed by `fluid_rate`.
        simulated_documents_per_s: of one full worker in a simulation of `SAMPLE_DOCUMENTS`.
        shortcut_error: how far the computed rate is above the simulated one, a share of it.
        workers: by the lower of the two, with nothing to spare.
        fleet: of all processes, workers too, with head-room and spread over zones.
    """

    documents: int
    hours: float
    documents_per_s: float
    worker_documents_per_s: float
    simulated_documents_per_s: float
    shortcut_error: float
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
    """Plans with workers that are full all the time, as bulk work keeps them.

    Args:
        cost_error: of the cost of a step, a share of it.
        processes: what a document costs those beside the workers.
    """
    needed = documents / (hours * 3600)
    prompt, answer = _means(mix, seed)
    fluid = fluid_rate(setup.cost, setup.limits, prompt, answer)
    simulated = simulated_rate(mix, setup, seed)
    slower = min(fluid, simulated)
    workers = math.ceil(needed / slower)
    worker_hours = documents / slower / 3600
    return JobPlan(
        documents=documents,
        hours=hours,
        documents_per_s=needed,
        worker_documents_per_s=fluid,
        simulated_documents_per_s=simulated,
        shortcut_error=fluid / simulated - 1,
        workers=workers,
        worker_hours=worker_hours,
        cost=None if worker_hour_price is None else worker_hours * worker_hour_price,
        fleet=(
            *fleets(needed, answer, sizing, processes),
            fleet("worker", needed / slower, cost_error + abs(fluid / simulated - 1), sizing),
        ),
    )


def fluid_rate(cost: StepCost, limits: EngineLimits, prompt: float, answer: float) -> float:
    """Documents a second of one worker whose slots are always taken.

    A row stays for one step a token of its answer; in that time the worker computes as many prompts as it has rows.
    """
    rows: float = limits.slots
    if limits.cache_tokens:
        rows = max(1.0, min(rows, limits.cache_tokens / (prompt + answer)))
    context = prompt + answer / 2
    steps = max(1.0, answer)
    decoding = rows * (steps - 1) / steps
    prefill = rows / steps * prompt
    if limits.prefill_tokens:
        steps *= max(1.0, prefill / limits.prefill_tokens)
        prefill = min(prefill, limits.prefill_tokens)
    seconds = cost(prefill, decoding, decoding * context, prefill * prompt / 2)
    return rows / (steps * seconds)


def simulated_rate(mix: LengthMix, setup: Setup, seed: int) -> float:
    """Documents a second of one worker with a backlog, between the 10th and the 80th percent of a sample."""
    rng = Random(seed)
    trace = []
    for _ in range(SAMPLE_DOCUMENTS):
        prompt, answer = mix.prompt.draw(rng), mix.answer.draw(rng)
        trace.append(Arrival(0.0, prompt, answer, answer, "bulk"))
    history = simulate(trace, replace(setup, workers=1, admission=False, until_s=None))
    ends = sorted(
        o.ended_at for o in history.outcomes if o.ending is Ending.FINISHED and o.ended_at
    )
    first, last = ends[len(ends) // 10], ends[len(ends) * 8 // 10]
    return (len(ends) * 8 // 10 - len(ends) // 10) / (last - first)


def _means(mix: LengthMix, seed: int) -> tuple[float, float]:
    rng = Random(seed)
    draws = [(mix.prompt.draw(rng), mix.answer.draw(rng)) for _ in range(MEAN_DRAWS)]
    return sum(p for p, _ in draws) / MEAN_DRAWS, sum(a for _, a in draws) / MEAN_DRAWS
