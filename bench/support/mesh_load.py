"""The loads of bench/batcher.py on the embedded mesh, with an engine whose capacity is known: `echo` at a fixed pace.

Policies are configured, one mesh for each: the default, and first come, first served.
"""

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from bench.support.harness import Figure, machine
from bench.support.mixed_load import FCFS, OURS
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
TENANTS_S: Final = 60.0
OUTSTANDING: Final = 200
"""Bulk requests at a time."""
RAMP_S: Final = 1.0
"""In which their callers begin: all at once would measure how long client and gateway take to open 200 calls."""
MANY, FEW = 400, 40
"""Requests at a time of two tenants; both always have more than there is room for."""
SLO_S: Final = 0.5


@dataclass(frozen=True)
class Mixed:
    """The results of one round."""

    goodput_per_s: float
    ttft_p99_s: float
    bulk_tokens_per_s: float


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
    """Both policies, ``runs`` rounds of each; rounds of one policy follow each other, as a mesh has only one."""
    async with _mesh(OURS) as load:
        rounds = [
            (
                await _flood(load),
                await _round(load, seed, bulk=False),
                await _round(load, seed, bulk=True),
            )
            for seed in range(1, runs + 1)
        ]
        error = [await _tenant_error(load) for _ in range(runs)]
    async with _mesh(FCFS) as load:
        fcfs = [await _round(load, seed, bulk=True) for seed in range(1, runs + 1)]
        fcfs_error = [await _tenant_error(load) for _ in range(runs)]
    full, alone, mixed = map(list, zip(*rounds, strict=True))
    # What the mesh makes of the nominal rate: a row's slot is free for a step until the next one has it.
    capacity = statistics.median(sum(a.answer_tokens for a in done) for done in full) / FLOOD_S
    left = capacity - RATE * INTERACTIVE.answer_tokens
    goodput, peer_goodput = _median(mixed, _goodput), _median(fcfs, _goodput)
    ttft, peer_ttft = _median(mixed, _ttft_ms), _median(alone, _ttft_ms)
    bulk = _median(mixed, lambda m: m.bulk_tokens_per_s)
    ours_error, peer_error = statistics.median(error), statistics.median(fcfs_error)
    where = (
        f"embedded mesh, echo engine, {SLOTS} slots, {STEP_MS:g} ms a step; interactive Poisson "
        f"at 50 % of capacity for {SECONDS:g} s, from second {FLOOD_AT_S:g} on {OUTSTANDING} "
        f"bulk requests at a time, whose callers begin within {RAMP_S:g} s"
    )
    # A peer that kept no promise counts as one that kept one, so that there is a ratio.
    least = 1 / SECONDS
    rows = [
        ("goodput_vs_fifo", goodput, peer_goodput, goodput / max(peer_goodput, least), "requests/s in SLO",
         f"{where}; TTFT below {SLO_S:g} s; peer: first come, first served; target 2"),
        ("interactive_ttft_vs_alone", ttft, peer_ttft, peer_ttft / ttft, "ms",
         f"{where}; p99; peer: without bulk; target 1/1.2"),
        ("bulk_share_of_leftover", bulk, left, bulk / left, "tokens/s",
         f"{where}; peer: {capacity:.0f} tokens/s of bulk alone less the interactive load; target 0.85"),
        ("tenant_share_error", ours_error, peer_error, peer_error / max(ours_error, 1e-3), "share",
         f"embedded mesh; two tenants of equal weight over {TENANTS_S:g} s, {MANY} and {FEW} requests at a time;"
         " peer: first come, first served; target 0.1"),
    ]  # fmt: skip
    return [
        Figure(f"mesh_{name}", ours, peer, ratio, unit, runs, machine(), note)
        for name, ours, peer, ratio, unit, note in rows
    ]


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
    ttfts = [arrival.ttft_s for arrival in answered if arrival.ttft_s is not None]
    done = await flood if flood is not None else []
    return Mixed(
        goodput_per_s=sum(ttft <= SLO_S for ttft in ttfts) / SECONDS,
        ttft_p99_s=percentiles(ttfts).p99 or SECONDS,
        bulk_tokens_per_s=sum(arrival.answer_tokens for arrival in done) / FLOOD_S,
    )


async def _late_flood(load: OpenLoad) -> list[Arrival]:
    await asyncio.sleep(FLOOD_AT_S)
    return await _flood(load)


async def _flood(load: OpenLoad) -> list[Arrival]:
    return await load.flood(BULK, OUTSTANDING, FLOOD_S, RAMP_S)


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


def _median(rounds: list[Mixed], pick: Callable[[Mixed], float]) -> float:
    return statistics.median(pick(round_) for round_ in rounds)


def _goodput(mixed: Mixed) -> float:
    return mixed.goodput_per_s


def _ttft_ms(mixed: Mixed) -> float:
    return mixed.ttft_p99_s * 1e3
