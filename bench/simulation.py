"""Accuracy of the simulation under load: the same trace, measured on the mesh and simulated.

    python bench/simulation.py [--json] [--runs N] [--model echo|small|large] [--fit]

The mesh is as shipped but for `SLOTS`, on all cores of this machine, with the callers beside it. For each model, on a
mesh of its own that is otherwise idle, a round is, in this order:

1. Steps of the worker, straight through Triton, to which the cost of a step is fitted, and the way to it and back.
2. Processor time of all threads but the one that computes steps, callers too, in closed rounds of interactive requests
   (`ROUNDS`): least squares give what a request, a report of the worker and a streamed token take (`Sharing`).
3. Capacity: answers a second while `WAITING` requests of the mix wait for each slot. The mix is 70 % interactive and
   30 % bulk with prompts and answers of `PROMPT` and `ANSWER` tokens.
4. The fit: a trace of the mix at `SHARE` of the capacity, open loop, seed 0. `fit_load` finds the slowdown of shared
   cores and the ways in and out. `--fit` prints all costs as a line for `sluice simulate --cost`, and ends here.
5. A trace with another seed at the same load, which the fit has not seen; what was sent is simulated.

A rented machine computes up to 40 % faster or slower a few minutes later, so each trace follows its own fit.

`simulation_error_MODEL_at_60`: of a trace the largest error of p50 and p95 of first token and latency of interactive
requests, simulated beside measured; peer: the bound. `also` has simulated over measured of each, medians. The engine
`echo` waits a fixed time a step and computes nothing: it shows queueing and ways; tiers show the cost of steps, too.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import psutil
import uvloop
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.engine_cost import StepProbe
from bench.support.harness import Figure, emit, options_of, paired
from bench.support.load import processes_of
from bench.support.meshes import echo, mesh_of, mesh_settings
from bench.support.open_load import OpenLoad
from bench.support.triton_direct import DirectWorker
from gateway.config.models import load_catalog
from simulator.arrivals import generate, parse_stream
from simulator.cores import Sharing
from simulator.cost import CostFit
from simulator.engines import EngineLimits
from simulator.measured import TIMES, MeshCost, fit_load, simulated, times
from simulator.simulator import Links, Setup
from simulator.trace import Arrival
from sluice import settings as config
from sluice.v1 import inference_pb2_grpc
from supervisor.mesh import Mesh
from supervisor.model_processes import stub_pids

SHARE: Final = 0.6
"""Of the capacity."""
ERROR_MAX: Final = 0.25
SECONDS: Final = 15.0
ECHO: Final = "echo"
SLOTS: Final = {ECHO: 16, "small": 4, "large": 4}
ECHO_STEP_MS: Final = 20.0
MODELS: Final = (ECHO, "small")
"""Unless others are asked for."""
ROUNDS: Final = {1: 100, 32: 12}
"""Requests of each caller, by the tokens of their answers; one caller, and as many as there are slots, do both."""
REPEATS: Final = 2
WAITING: Final = 3
FLOOD_S: Final = 8.0
PROMPT: Final = "uniform/20/300"
ANSWER: Final = "uniform/4/60"
Pair = tuple[dict[str, float], dict[str, float]]
"""Times of a trace, simulated and measured."""
Threads = Mapping[int, Mapping[int, float]]
"""Processor time of each thread of a process, seconds."""


def bench_settings(model: str) -> config.Settings:
    """One shipped tier, or an engine without a model whose steps take a fixed time."""
    if model == ECHO:
        return mesh_settings(echo(SLOTS[ECHO], name=ECHO, tier=ECHO, echo_step_ms=ECHO_STEP_MS))
    path = f"builtin:{model}"
    tier = config.ModelSettings(name=model, tier=model, path=path, slots=SLOTS[model])
    return mesh_settings(tier)


async def sharing_of(load: OpenLoad, mesh: Mesh, model: str) -> Sharing:
    """What requests, reports and tokens take; see step 2."""
    work, spent = [], []
    for callers in (1, SLOTS[model]) * REPEATS:
        for tokens, requests in ROUNDS.items():
            arrival, before = Arrival(0.0, 64, tokens, tokens, "interactive"), threads_of(mesh)
            answered = await load.repeat(arrival, callers, requests)
            spent.append(spent_s(mesh, before, threads_of(mesh)))
            # The first tokens of requests come by themselves, the others of all callers together.
            reports = answered * (1 + (tokens - 1) / callers)
            work.append((answered, reports, answered * tokens))
    request_s, report_s, token_s = map(float, nnls(np.array(work), np.array(spent))[0])
    cores, share = len(os.sched_getaffinity(0)), float(model != ECHO)
    return Sharing(cores, request_s, report_s, token_s, step_share=share)


def threads_of(mesh: Mesh) -> Threads:
    """Of all processes, this one too."""
    processes = (psutil.Process(), *processes_of(mesh).values())
    return {one.pid: {thread.id: sum(thread[1:]) for thread in one.threads()} for one in processes}


def spent_s(mesh: Mesh, before: Threads, after: Threads) -> float:
    """Processor time of all threads but the busiest of each model's process, which computes the steps."""
    servers = [state.pid for state in mesh.state.processes if state.pid is not None]
    models = {pid for server in servers for pid in stub_pids(server).values()}
    total = 0.0
    for pid, threads in after.items():
        spent = [seconds - before[pid].get(thread, 0.0) for thread, seconds in threads.items()]
        total += sum(spent) - (max(spent) if pid in models else 0.0)
    return total


def mix(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Requests of the mix, ``rate`` a second."""
    streams = [
        parse_stream(f"poisson:rate={part * rate},{keys},prompt={PROMPT},answer={ANSWER}")
        for part, keys in ((0.7, "class=interactive"), (0.3, "class=bulk"))
    ]
    return generate(streams, seconds, seed)


async def measured(
    load: OpenLoad, mesh: Mesh, model: str, capacity: float
) -> tuple[CostFit, Setup]:
    """What the simulation is given: steps 1 to 4."""
    settings = mesh.settings
    vocabulary = load_catalog(settings)[model].tokenizer.vocab_size
    async with DirectWorker(mesh.worker_address(model), model) as worker:
        steps = await StepProbe(worker, vocabulary, SLOTS[model], min_tokens=True).measure()
    setup = Setup(
        policy=settings.batcher.policy,
        cost=steps.fit.cost,
        limits=EngineLimits(slots=SLOTS[model]),
        links=Links(send_s=steps.send_s),
        sharing=await sharing_of(load, mesh, model),
    )
    return steps.fit, fit_load(await load.play(mix(SHARE * capacity, SECONDS, 0)), setup)


async def bench(model: str, runs: int) -> tuple[MeshCost, list[Figure]]:
    """Measures, fits, plays and simulates one model, on a mesh of its own; without ``runs`` there are no figures."""
    pairs: list[Pair] = []
    async with (
        mesh_of(bench_settings(model)) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
    ):
        load = OpenLoad(inference_pb2_grpc.InferenceServiceStub(channel), model)
        for seed in range(1, max(runs, 1) + 1):
            answered = await load.flood(iter(mix(100.0, 60.0, 0)), WAITING * SLOTS[model], FLOOD_S)
            capacity = len(answered) / FLOOD_S
            steps, setup = await measured(load, mesh, model, capacity)
            assert setup.sharing is not None
            cost = MeshCost(steps.cost, steps.error, setup.links, setup.sharing)
            print(f"{model}: {capacity:.1f} answers/s, {cost}", file=sys.stderr)
            if runs:
                trace = await load.play(mix(SHARE * capacity, SECONDS, seed))
                pairs.append((times(simulated(trace, setup)), times(trace)))
                print("simulated, measured:", *pairs[-1], file=sys.stderr)
    return cost, [_figure(model, pairs)] if pairs else []


def _figure(model: str, pairs: list[Pair]) -> Figure:
    errors = [max(abs(a[name] / b[name] - 1) for name in TIMES) for a, b in pairs]
    return paired(
        f"simulation_error_{model}_at_{round(100 * SHARE)}",
        errors,
        [ERROR_MAX] * len(pairs),
        unit="share",
        higher_is_better=False,
        note=f"{SLOTS[model]} slots, {SHARE:.0%} of capacity, cores shared; peer: the bound",
        also={name: statistics.median(a[name] / b[name] for a, b in pairs) for name in TIMES},
    )


async def main(args: argparse.Namespace) -> None:
    """Runs the models asked for and prints."""
    figures = []
    for model in args.model or MODELS:
        cost, found = await bench(model, 0 if args.fit else args.runs)
        figures += found
        if args.fit:
            print(cost.line())
    emit(figures, args.json)


if __name__ == "__main__":
    parser = options_of(__doc__, "fits and traces")
    parser.add_argument("--model", choices=tuple(SLOTS), action="append", help="only this one")
    parser.add_argument("--fit", action="store_true", help="print the fitted costs alone")
    uvloop.run(main(parser.parse_args()))
