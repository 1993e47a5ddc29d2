"""`sluice plan` beside the embedded mesh at three sizes.

    python bench/plan.py [--json] [--runs N]

A worker is the echo engine with 16 slots and a step of `STEP_S`, so that all of them leave the cores to the mesh, and
its capacity is known. Documents are bulk requests with prompts and answers of the lengths below; three times as many
as there are slots wait at any time. A run is a mesh of one of `SIZES`, flooded for `SECONDS` after `WARM_S`.

- `plan_documents_SIZE`: documents/s that `sluice plan` computes for the workers of SIZE, and that the mesh answered.
- `plan_cores_SIZE`: cores that all processes but the engines take at the measured rate, by the costs of
  `scripts/bench processes` that `sluice plan` ships, and measured; `also` has the processes. Triton's process holds the
  worker and its streams, so the steps of the echo engine, which sleep, are in it too.

Ours is planned, peer measured, and their ratio best at 1; medians.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.processes import used_s
from bench.support.harness import Figure, emit, machine, options_of
from bench.support.meshes import echo, mesh_of, mesh_settings
from bench.support.open_load import OpenLoad
from simulator.arrivals import LengthMix, Uniform
from simulator.cost import StepCost
from simulator.engines import EngineLimits
from simulator.fleet import SHIPPED
from simulator.planner import plan_job
from simulator.simulator import Setup
from simulator.trace import Arrival
from sluice import settings as config
from sluice.settings.batching import Policy
from sluice.v1 import inference_pb2_grpc

MODEL: Final = "echo"
SLOTS: Final = 16
STEP_S: Final = 0.025
PROMPT: Final = 100
ANSWER: Final = 32
SECONDS: Final = 20.0
WARM_S: Final = 8.0
WAITING: Final = 3
"""Requests at a time for each slot."""


@dataclass(frozen=True)
class Size:
    """Processes of a mesh."""

    workers: int
    gateways: int

    def __str__(self) -> str:
        return f"{self.workers}_workers"

    def settings(self) -> config.Settings:
        """Everything else as shipped."""
        gateway = config.GatewaySettings(address="127.0.0.1:0", replicas=self.gateways)
        model = echo(SLOTS, echo_step_ms=1000 * STEP_S, replicas=self.workers)
        return mesh_settings(model, gateway=gateway)


SIZES: Final = (Size(1, 1), Size(2, 1), Size(4, 2))


@dataclass(frozen=True)
class Found:
    """What a mesh did: documents/s, and cores by process."""

    documents_per_s: float
    cores: Mapping[str, float]


async def measured(size: Size) -> Found:
    """One run."""
    async with mesh_of(size.settings()) as mesh:
        channels = [grpc.aio.insecure_channel(one) for one in mesh.address.split(",")]
        stubs = map(inference_pb2_grpc.InferenceServiceStub, channels)
        loads = [OpenLoad(stub, MODEL) for stub in stubs]
        flood = asyncio.gather(*(_flood(load, size, len(loads)) for load in loads))
        await asyncio.sleep(WARM_S)
        before, begun = used_s(mesh), time.perf_counter()
        await asyncio.sleep(SECONDS)
        after, lasted = used_s(mesh), time.perf_counter() - begun
        ended = [done for answered in await flood for done in answered]
        await asyncio.gather(*(channel.close() for channel in channels))
    return Found(
        sum(WARM_S < at <= WARM_S + SECONDS for at in ended) / SECONDS,
        {name: (after[name] - before[name]) / lasted for name in after},
    )


async def _flood(load: OpenLoad, size: Size, gateways: int) -> list[float]:
    """When each answer ended, seconds."""
    document = Arrival(0.0, PROMPT, ANSWER, ANSWER, "bulk")
    waiting = WAITING * SLOTS * size.workers // gateways
    answered = await load.flood(repeat(document), waiting, WARM_S + SECONDS + 1.0)
    return [one.at_s + (one.latency_s or 0.0) for one in answered]


def planned_per_s(size: Size) -> float:
    """Documents/s of the workers, by `sluice plan`."""
    setup = Setup(
        policy=Policy(),
        cost=StepCost(STEP_S, 0.0, 0.0, 0.0),
        limits=EngineLimits(slots=SLOTS),
    )
    plan = plan_job(
        1_000, 1.0, LengthMix(Uniform(PROMPT, PROMPT), Uniform(ANSWER, ANSWER)), setup, seed=1
    )
    return size.workers * plan.worker_documents_per_s


def planned_cores(documents_per_s: float) -> dict[str, float]:
    """By process, with one server of NATS."""
    return {name: documents_per_s * cost.core_s(ANSWER)[0] for name, cost in SHIPPED.items()}


def figures_of(size: Size, runs: list[Found]) -> list[Figure]:
    """Of one size."""
    rate = statistics.median(run.documents_per_s for run in runs)
    cores = {name: statistics.median(run.cores[name] for run in runs) for name in SHIPPED}
    planned, planned_rate = planned_cores(rate), planned_per_s(size)
    all_planned, all_cores = sum(planned.values()), sum(cores.values())
    also = {f"planned_{name}_cores": value for name, value in planned.items()}
    also |= {f"{name}_cores": value for name, value in cores.items()}
    where = (
        f"{size.workers} workers, {size.gateways} gateways, one batcher; planned beside measured"
    )
    return [
        Figure(f"plan_documents_{size}", planned_rate, rate, planned_rate / rate, "documents/s",
               len(runs), machine(), where),
        Figure(f"plan_cores_{size}", all_planned, all_cores, all_planned / all_cores, "cores",
               len(runs), machine(), where, {}, also),
    ]  # fmt: skip


async def bench(runs: int) -> list[Figure]:
    """All sizes, in alternating order."""
    found: dict[Size, list[Found]] = {size: [] for size in SIZES}
    for number in range(runs):
        for size in SIZES if number % 2 else reversed(SIZES):
            found[size].append(await measured(size))
    return [figure for size, runs_ in found.items() for figure in figures_of(size, runs_)]


def main() -> None:
    parser = options_of(__doc__, "meshes of each size")
    options = parser.parse_args()
    emit(uvloop.run(bench(options.runs)), options.json)


if __name__ == "__main__":
    main()
