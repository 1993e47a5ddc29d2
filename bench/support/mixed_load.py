"""Mixed loads for the batcher in the simulator, and their results."""

from dataclasses import dataclass, replace
from typing import Final

from bench.support.core_load import BATCH_ROWS
from simulator.arrivals import MIXES, generate, parse_stream
from simulator.cost import named_cost
from simulator.engines import EngineLimits
from simulator.planner import simulated_rate
from simulator.results import DEFAULT_SLOS, Ending, History, summarize
from simulator.simulator import Setup, simulate
from simulator.trace import Arrival
from sluice.settings.batching import Policy

FCFS: Final = Policy.model_validate({"name": "window", "wait_s": 0})
"""First come, first served, into whatever slot is free: no class, no tenant, no wait. The strongest form of it."""
OURS: Final = Policy()

PREFILL_TOKENS: Final = 512
"""Of a step, as in the shipped engine."""
SECONDS: Final = 60.0
FLOOD_AT_S: Final = 10.0
"""Before it the first come are the first served in time, too: a peer of nothing would make any ratio."""
FLOOD: Final = 20_000
SHARE: Final = 0.5
"""Of what a worker can do, by interactive requests alone."""


def setup(policy: Policy) -> Setup:
    """One worker of the large tier on a CPU; the batcher sees all that waits."""
    return Setup(
        policy=policy,
        cost=named_cost("large-cpu"),
        limits=EngineLimits(slots=BATCH_ROWS, prefill_tokens=PREFILL_TOKENS),
        prefetch_rows=2 * FLOOD,
        until_s=SECONDS,
    )


def interactive(seed: int) -> list[Arrival]:
    """Poisson at half of the capacity."""
    rate = SHARE * simulated_rate(MIXES["desk"], setup(OURS), seed)
    stream = parse_stream(f"poisson:rate={rate},class=interactive,lengths=desk")
    return generate([stream], SECONDS, seed)


def bulk(
    seed: int, start_s: float = 0.0, tenant: str = "default", count: int = FLOOD
) -> list[Arrival]:
    """A flood of documents, more than can be done."""
    keys = f"count={count},class=bulk,start_s={start_s},tenant={tenant}"
    stream = parse_stream(f"flood:{keys},prompt=lognormal/200/0.7/800,answer=lognormal/30/0.5/128")
    return generate([stream], SECONDS, seed + 1)


def together(*loads: list[Arrival]) -> list[Arrival]:
    """All of them, in order of time."""
    return sorted((arrival for load in loads for arrival in load), key=lambda a: a.at_s)


@dataclass(frozen=True)
class Seen:
    """The results of one run, over `SECONDS`."""

    interactive_goodput_per_s: float
    interactive_ttft_p99_s: float
    work_per_s: dict[str, float]
    """Tokens of prompts and answers that were finished, by class."""


def play(trace: list[Arrival], policy: Policy) -> Seen:
    """One run."""
    history = simulate(trace, setup(policy))
    classes = {c.priority_class: c for c in summarize(history, DEFAULT_SLOS).classes}
    first = classes.get("interactive")
    return Seen(
        interactive_goodput_per_s=first.goodput_per_s if first else 0.0,
        interactive_ttft_p99_s=(first.ttft_s.p99 or SECONDS) if first else 0.0,
        work_per_s={name: _work(history, name) / SECONDS for name in classes},
    )


def _work(history: History, priority_class: str) -> float:
    return sum(
        o.arrival.prompt_tokens + o.arrival.answer_tokens
        for o in history.outcomes
        if o.ending is Ending.FINISHED and o.arrival.priority_class == priority_class
    )


def leftover_share(seed: int) -> tuple[float, float]:
    """Tokens/s that bulk got beside interactive traffic, and what that leaves of what bulk gets alone.

    Left is the part of the worker's time that interactive requests of this rate do not need when the worker is full.
    """
    urgent, flood = interactive(seed), bulk(seed)
    mixed = play(together(urgent, flood), OURS).work_per_s["bulk"]
    alone = play(flood, OURS).work_per_s["bulk"]
    return mixed, alone * (1 - SHARE)


def tenant_error(policy: Policy, seed: int, weights: dict[str, float]) -> float:
    """How far the worse of two tenants is from its share, when one sends ten times as much: a share of it."""
    trace = together(
        bulk(seed, tenant="many", count=FLOOD), bulk(seed + 50, tenant="few", count=FLOOD // 10)
    )
    history = simulate(trace, replace(setup(policy), weights=weights))
    got = dict.fromkeys(weights, 0.0)
    for outcome in history.outcomes:
        if outcome.ending is Ending.FINISHED:
            request = outcome.arrival
            got[request.tenant] += request.prompt_tokens + request.answer_tokens
    total, weight = sum(got.values()), sum(weights.values())
    return max(abs(got[name] / total / (weights[name] / weight) - 1) for name in weights)


def padded_tokens_per_s(policy: Policy, seed: int, answer: int) -> float:
    """Tokens/s of a worker with static batches, for prompts of the lengths of `core_load.LENGTHS`."""
    keys = f"count=4000,class=bulk,prompt=lognormal/200/1/4096,answer={answer}"
    trace = generate([parse_stream(f"flood:{keys}")], 1.0, seed)
    limits = EngineLimits(slots=BATCH_ROWS, waiting=BATCH_ROWS)
    used = replace(setup(policy), engine="padded", limits=limits, until_s=None)
    history = simulate(trace, used)
    return sum(a.prompt_tokens + a.answer_tokens for a in trace) / history.seconds
