"""Mixed loads for the batcher in the simulator, and their results.

One worker of the large tier on a CPU (32 slots), the batcher as shipped; `SECONDS` long. Interactive
requests are Poisson at `SHARE` of what the worker can do, of the lengths of the shipped tasks. Bulk is a flood of
`FLOOD` documents at once. What is said of interactive requests is of those that arrive after the flood.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from bench.support.core_load import BATCH_ROWS
from simulator.arrivals import MIXES, generate, parse_stream
from simulator.cost import named_cost
from simulator.engines import EngineLimits
from simulator.planner import simulated_rate
from simulator.results import DEFAULT_SLOS, Ending, History, percentiles
from simulator.simulator import Setup, simulate
from simulator.trace import Arrival
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES

FCFS: Final = Policy(order="arrival", waiting_tokens_max=math.inf)
"""First come, first served, into whatever slot is free: no class, no tenant, no wait. The strongest form of it."""
PRIORITY: Final = Policy(order="class", waiting_tokens_max=math.inf, max_rows=BATCH_ROWS)
"""By class alone; it takes slots of bulk rows as ours does."""
OURS: Final = Policy()

PREFILL_TOKENS: Final = 512
"""Of a step, as in the shipped engine."""
SECONDS: Final = 60.0
FLOOD_AT_S: Final = 10.0
"""The flood meets traffic that runs."""
FLOOD: Final = 20_000
FLOODED: Final = 100_000
SHARE: Final = 0.5
"""Of what a worker can do, by interactive requests alone."""
WEIGHTS: Final = {"many": 1.0, "few": 1.0}
"""Of two tenants."""
EQUAL: Final = 450
"""Documents of each of two tenants."""
EQUAL_S: Final = 5.0
"""In which neither of them runs out."""


def setup(policy: Policy) -> Setup:
    """One worker of the large tier on a CPU."""
    return Setup(
        policy=policy,
        cost=named_cost("large-cpu"),
        limits=EngineLimits(slots=BATCH_ROWS, prefill_tokens=PREFILL_TOKENS),
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
    """The results of one run: of interactive requests after `FLOOD_AT_S`, of work over `SECONDS`."""

    goodput_per_s: float
    ttft_p99_s: float
    work_per_s: dict[str, float]
    """Tokens of prompts and answers that were finished, by class."""


def play(trace: list[Arrival], policy: Policy) -> Seen:
    """One run. A request that got no first token counts with the time that it waited in vain."""
    history = simulate(trace, setup(policy))
    urgent = [
        outcome
        for outcome in history.outcomes
        if outcome.arrival.priority_class == "interactive" and outcome.arrival.at_s >= FLOOD_AT_S
    ]
    met = sum(DEFAULT_SLOS["interactive"].met(outcome) for outcome in urgent)
    ttfts = [o.ttft_s if o.ttft_s is not None else SECONDS - o.arrival.at_s for o in urgent]
    return Seen(
        goodput_per_s=met / (SECONDS - FLOOD_AT_S),
        ttft_p99_s=percentiles(ttfts).p99 or 0.0,
        work_per_s={name: _work(history, name) / SECONDS for name in CLASSES},
    )


def offered_per_s(trace: list[Arrival]) -> float:
    """Interactive requests a second that arrive after the flood."""
    urgent = [a for a in trace if a.priority_class == "interactive" and a.at_s >= FLOOD_AT_S]
    return len(urgent) / (SECONDS - FLOOD_AT_S)


def _work(history: History, priority_class: str) -> float:
    return sum(
        o.arrival.prompt_tokens + o.arrival.answer_tokens
        for o in history.outcomes
        if o.ending is Ending.FINISHED and o.arrival.priority_class == priority_class
    )


def flooded_tenant_error(policy: Policy, seed: int) -> float:
    """One tenant sends `FLOODED` documents, then another a tenth of them."""
    trace = together(
        bulk(seed, tenant="many", count=FLOODED),
        bulk(seed + 50, tenant="few", count=FLOODED // 10),
    )
    return _tenant_error(trace, replace(setup(policy), weights=WEIGHTS))


def tenant_error(policy: Policy, seed: int) -> float:
    """Two tenants send `EQUAL` documents each, one after the other; their shares over `EQUAL_S`."""
    trace = together(*(bulk(seed + n, tenant=name, count=EQUAL) for n, name in enumerate(WEIGHTS)))
    return _tenant_error(trace, replace(setup(policy), weights=WEIGHTS, until_s=EQUAL_S))


def _tenant_error(trace: list[Arrival], used: Setup) -> float:
    """How far the worse of two tenants is from its share, a share of it."""
    got = dict.fromkeys(WEIGHTS, 0.0)
    for outcome in simulate(trace, used).outcomes:
        if outcome.ending is Ending.FINISHED:
            request = outcome.arrival
            got[request.tenant] += request.prompt_tokens + request.answer_tokens
    return max(abs(tokens / sum(got.values()) * len(WEIGHTS) - 1) for tokens in got.values())


def padded_tokens_per_s(policy: Policy, seed: int, answer: int) -> float:
    """Tokens/s of a worker with static batches, for prompts of the lengths of `core_load.LENGTHS`."""
    keys = f"count=4000,class=bulk,prompt=lognormal/200/1/4096,answer={answer}"
    trace = generate([parse_stream(f"flood:{keys}")], 1.0, seed)
    limits = EngineLimits(slots=BATCH_ROWS, waiting=BATCH_ROWS)
    used = replace(setup(policy), engine="padded", limits=limits, until_s=None)
    history = simulate(trace, used)
    return sum(a.prompt_tokens + a.answer_tokens for a in trace) / history.seconds
