"""The loads of bench/batcher.py on the embedded mesh, with an engine whose capacity is known: `echo` at a fixed pace.

Echo engine, `SLOTS` rows, `STEP_MS` a step: `TOKENS_PER_S` when all slots are taken. Interactive requests are Poisson
at half of that for `SECONDS`; from `FLOOD_AT_S` on `OUTSTANDING` bulk callers, all at once, send one request after the
other. What is said of interactive requests is of those that are sent after the flood. A round starts one mesh after the
other: with the default policy, by class alone, and first come, first served; seeds are 1 to N.

- `mesh_goodput_vs_fifo`, `mesh_goodput_vs_priority`: requests with a first token within `SLO_S`, a second.
- `mesh_interactive_ttft_vs_alone`: their p99; the peer is the same without bulk.
- `mesh_bulk_share_of_leftover`: tokens/s of bulk; the peer is `TOKENS_PER_S` less what interactive requests ask for.
- `mesh_tenant_share_error`: `MANY` and `FEW` bulk requests at a time of two tenants of equal weight for `TENANTS_S`.
"""

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc

from bench.support.harness import Figure, machine
from bench.support.mixed_load import FCFS, OURS, PRIORITY
from bench.support.open_load import OpenLoad
from simulator.arrivals import generate, parse_stream
from simulator.results import percentiles
from simulator.trace import Arrival
from sluice import settings as config
from sluice.settings.batching import Policy
from sluice.settings.routing import RoutingSettings
from sluice.v1 import inference_pb2_grpc
from supervisor.mesh import running_mesh

SLOTS: Final = 16
STEP_MS: Final = 20.0
INTERACTIVE: Final = Arrival(0.0, 30, 10, 10, "interactive")
BULK: Final = Arrival(0.0, 60, 20, 20, "bulk")
TOKENS_PER_S: Final = SLOTS / STEP_MS * 1000
"""Answers of a worker that is full at every step."""
RATE: Final = 0.5 * TOKENS_PER_S / INTERACTIVE.answer_tokens
SECONDS: Final = 20.0
FLOOD_AT_S: Final = 2.0
"""The flood meets traffic that runs."""
FLOOD_S: Final = SECONDS - FLOOD_AT_S
TENANTS_S: Final = 30.0
OUTSTANDING: Final = 200
"""Bulk callers."""
MANY, FEW = 400, 40
"""Requests at a time of two tenants; both always have more than there is room for."""
SLO_S: Final = 0.5


@dataclass(frozen=True)
class Mixed:
    """The results of one round with one policy; of interactive requests after `FLOOD_AT_S`."""

    goodput_per_s: float
    ttft_p99_ms: float
    bulk_tokens_per_s: float
    tenant_error: float = 0.0


def mesh_settings(policy: Policy) -> config.Settings:
    """One echo model behind ``policy``."""
    model = config.ModelSettings(
        name="echo", path="builtin:small", engine="echo", slots=SLOTS, echo_step_ms=STEP_MS
    )
    return config.Settings(
        models=(model,),
        routing=RoutingSettings(default="echo"),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
        batcher=config.BatcherSettings(policy=policy),
    )


async def figures(runs: int) -> list[Figure]:
    """Rounds of one mesh for each policy, one after the other."""
    rounds = [await _all_policies(seed) for seed in range(1, runs + 1)]
    median = {
        name: {
            quantity: statistics.median(getattr(round_[name], quantity) for round_ in rounds)
            for quantity in Mixed.__dataclass_fields__
        }
        for name in rounds[0]
    }
    ours, fcfs, priority, alone = (median[n] for n in ("ours", "fcfs", "priority", "alone"))
    left = TOKENS_PER_S - RATE * INTERACTIVE.answer_tokens
    rows = [
        ("goodput_vs_fifo", "goodput_per_s", ours, fcfs["goodput_per_s"], "requests/s in SLO"),
        ("goodput_vs_priority", "goodput_per_s", ours, priority["goodput_per_s"], "requests/s in SLO"),
        ("interactive_ttft_vs_alone", "ttft_p99_ms", ours, alone["ttft_p99_ms"], "ms"),
        ("bulk_share_of_leftover", "bulk_tokens_per_s", ours, left, "tokens/s"),
        ("tenant_share_error", "tenant_error", ours, fcfs["tenant_error"], "share"),
    ]  # fmt: skip
    return [
        _figure(f"mesh_{name}", side[quantity], peer, unit, runs)
        for name, quantity, side, peer, unit in rows
    ]


def _figure(name: str, ours: float, peer: float, unit: str, runs: int) -> Figure:
    over = (ours, peer) if unit.endswith("SLO") or unit == "tokens/s" else (peer, ours)
    note = f"embedded mesh, echo engine, {SLOTS} slots, {STEP_MS:g} ms a step, {RATE:g} interactive requests/s"
    return Figure(
        *(name, ours, peer, over[0] / over[1] if over[1] else None, unit, runs, machine(), note),
        {"slots": SLOTS, "step_ms": STEP_MS, "rate": RATE, "bulk_callers": OUTSTANDING},
    )


async def _all_policies(seed: int) -> dict[str, Mixed]:
    found = {}
    for name, policy in {"ours": OURS, "priority": PRIORITY, "fcfs": FCFS}.items():
        async with _mesh(policy) as load:
            if name == "ours":
                found["alone"] = await _round(load, seed, bulk=False)
            round_ = await _round(load, seed, bulk=True)
            error = await _tenant_error(load)
        found[name] = replace(round_, tenant_error=error)
    return found


@asynccontextmanager
async def _mesh(policy: Policy) -> AsyncIterator[OpenLoad]:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with (
            running_mesh(mesh_settings(policy), state_dir=Path(folder)) as mesh,
            grpc.aio.insecure_channel(mesh.address) as channel,
        ):
            load = OpenLoad(inference_pb2_grpc.InferenceServiceStub(channel), "echo")
            await load.flood(BULK, SLOTS, 2.0)  # warms up
            yield load


async def _round(load: OpenLoad, seed: int, *, bulk: bool) -> Mixed:
    keys = f"rate={RATE},class=interactive,prompt={INTERACTIVE.prompt_tokens},answer={INTERACTIVE.answer_tokens}"
    trace = generate([parse_stream(f"poisson:{keys}")], SECONDS, seed)
    flood = asyncio.create_task(_late_flood(load)) if bulk else None
    answered = await load.play(trace)
    done = await flood if flood is not None else []
    ttfts = [a.ttft_s for a in answered if a.ttft_s is not None and a.at_s >= FLOOD_AT_S]
    return Mixed(
        goodput_per_s=sum(ttft <= SLO_S for ttft in ttfts) / FLOOD_S,
        ttft_p99_ms=(percentiles(ttfts).p99 or SECONDS) * 1e3,
        bulk_tokens_per_s=sum(arrival.answer_tokens for arrival in done) / FLOOD_S,
    )


async def _late_flood(load: OpenLoad) -> list[Arrival]:
    await asyncio.sleep(FLOOD_AT_S)
    return await _flood(load)


async def _flood(load: OpenLoad) -> list[Arrival]:
    return await load.flood(BULK, OUTSTANDING, FLOOD_S)


async def _tenant_error(load: OpenLoad) -> float:
    loads = {"many": MANY, "few": FEW}
    answered = await asyncio.gather(
        *(
            load.flood(Arrival(0.0, 60, 20, 20, "bulk", tenant=name), count, TENANTS_S)
            for name, count in loads.items()
        )
    )
    tokens = [sum(arrival.answer_tokens for arrival in done) for done in answered]
    return max(abs(got / sum(tokens) / (1 / len(loads)) - 1) for got in tokens)
