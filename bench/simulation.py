"""Accuracy of the simulation: the same trace, measured on the mesh and simulated.

In each run, steps of the mesh's own worker are measured first, straight through Triton, and a cost is fitted to them;
the ways in and out are those of single requests on the idle mesh. Then a generated trace is played on the mesh, open
loop, at a share of its capacity, and what was really sent is simulated.

    python bench/simulation.py [--json] [--runs N] [--model echo|small|large]

`simulation_error_MODEL_at_60`: the largest error of p50 and p95 of first token and latency, simulated beside measured,
of a trace; peer: the bound. `also` has simulated over measured of each, medians. The engine `echo` takes a fixed time
a step and leaves the cores to the mesh: it shows how true the queueing is. The tiers show how true the cost is, too.

An engine is simulated as if it had its cores to itself, as it has in a cluster. So the model's process gets the last
core of this machine, and everything else, callers too, shares the others. A tier has 4 slots, so that the engine and
not that core is what limits: with 16 the small tier answers more than gateway and callers can carry on one.
"""

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.engine_cost import Measured, StepProbe
from bench.support.harness import Figure, emit, options_of, paired
from bench.support.load import processes_of
from bench.support.meshes import echo, mesh_of, mesh_settings
from bench.support.open_load import OpenLoad
from bench.support.triton_direct import DirectWorker
from gateway.config.models import load_catalog
from simulator.arrivals import generate, parse_stream
from simulator.engines import EngineLimits
from simulator.results import Ending, percentiles
from simulator.simulator import Links, Setup, simulate
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
MODELS: Final = tuple(SLOTS)
IDLE_REQUESTS: Final = 30
IDLE_S: Final = 0.1
"""Between two of them: processes that have just answered one answer the next faster than they do under light load."""
PROMPT: Final = "uniform/20/300"
ANSWER: Final = "uniform/4/60"
Pair = tuple[dict[str, float], dict[str, float]]
"""Quantities of a trace, simulated and measured."""
QUANTITIES: Final = ("ttft_p50", "ttft_p95", "latency_p50", "latency_p95", "tokens_per_s")


def bench_settings(model: str) -> config.Settings:
    """One shipped tier, or an engine without a model whose steps take a fixed time."""
    if model == ECHO:
        return mesh_settings(echo(SLOTS[ECHO], name=ECHO, tier=ECHO, echo_step_ms=ECHO_STEP_MS))
    path = f"builtin:{model}"
    tier = config.ModelSettings(name=model, tier=model, path=path, slots=SLOTS[model])
    return mesh_settings(tier)


async def measured_setup(
    load: OpenLoad, worker: DirectWorker, settings: config.Settings, vocabulary: int
) -> Setup:
    """What the simulation is given: the cost of a step and the ways, measured now on the idle mesh."""
    slots = settings.models[0].slots
    measured = await StepProbe(worker, vocabulary, slots, min_tokens=True).measure()
    ways_s = await idle_ways_s(load, measured)
    said = f"{measured.fit} send {measured.send_s:.5f} s, in and out {ways_s:.5f} s"
    print(said, file=sys.stderr)
    return Setup(
        policy=settings.batcher.policy,
        cost=measured.fit.cost,
        limits=EngineLimits(slots=slots),
        links=Links(ways_s / 2, measured.send_s, ways_s / 2),
    )


async def idle_ways_s(load: OpenLoad, measured: Measured) -> float:
    """What gateway, NATS and batcher take of a first token on an idle mesh, for requests that come one by one."""
    found = []
    for _ in range(IDLE_REQUESTS):
        await asyncio.sleep(IDLE_S)
        answered = await load.ask(Arrival(0.0, 64, 2, 2, "interactive"), 0.0)
        assert answered is not None
        assert answered.ttft_s is not None
        step_s = measured.fit.cost(answered.prompt_tokens, 0, 0)
        found.append(answered.ttft_s - step_s - 2 * measured.send_s)
    return max(0.0, statistics.median(found))


async def capacity_per_s(load: OpenLoad, slots: int) -> float:
    """Answers a second with all slots taken."""
    answered = await load.flood(Arrival(0.0, 160, 32, 32, "bulk"), 3 * slots, 6.0)
    return len(answered) / 6.0


def numbers(trace: list[Arrival]) -> dict[str, float]:
    """What is compared: seconds, and tokens/s."""
    ttft = percentiles(a.ttft_s for a in trace if a.ttft_s is not None)
    latency = percentiles(a.latency_s for a in trace if a.latency_s is not None)
    lasted = max(a.at_s + (a.latency_s or 0.0) for a in trace)
    values = (ttft.p50, ttft.p95, latency.p50, latency.p95)
    assert None not in values
    tokens = sum(a.answer_tokens for a in trace) / lasted
    return dict(zip(QUANTITIES, [*(v or 0.0 for v in values), tokens], strict=True))


def simulated(trace: list[Arrival], setup: Setup) -> list[Arrival]:
    """The same requests with the times that the simulation says."""
    outcomes = simulate(sorted(trace, key=lambda a: a.at_s), setup).outcomes
    assert all(outcome.ending is Ending.FINISHED for outcome in outcomes)
    return [replace(o.arrival, ttft_s=o.ttft_s, latency_s=o.latency_s) for o in outcomes]


async def play(load: OpenLoad, setup: Setup, rate: float, seed: int) -> Pair:
    """One trace of ``rate`` requests a second, on the mesh and simulated."""
    streams = [
        parse_stream(f"poisson:rate={part * rate},{keys},prompt={PROMPT},answer={ANSWER}")
        for part, keys in ((0.7, "class=interactive"), (0.3, "class=bulk"))
    ]
    answered = await load.play(generate(streams, SECONDS, seed))
    return numbers(simulated(answered, setup)), numbers(answered)


def _figure(model: str, pairs: list[Pair]) -> Figure:
    names = QUANTITIES[:-1]
    errors = [max(abs(a[name] / b[name] - 1) for name in names) for a, b in pairs]
    return paired(
        f"simulation_error_{model}_at_{round(100 * SHARE)}",
        errors,
        [ERROR_MAX] * len(pairs),
        unit="share",
        higher_is_better=False,
        note=f"{SLOTS[model]} slots, engine on a core of its own, {SHARE:.0%} of capacity; peer: the bound",
        also={name: statistics.median(a[name] / b[name] for a, b in pairs) for name in QUANTITIES},
    )


@contextmanager
def engine_alone(mesh: Mesh) -> Iterator[None]:
    """The last core for the model's process, the others for this process and the rest of the mesh."""
    cores = os.sched_getaffinity(0)
    *others, last = sorted(cores)
    engines = {pid for state in mesh.state.processes for pid in stub_pids(state.pid).values()}
    for process in processes_of(mesh).values():
        _move(process.pid, {last} if process.pid in engines else set(others))
    _move(os.getpid(), set(others))
    try:
        yield
    finally:
        _move(os.getpid(), cores)


def _move(pid: int, cores: set[int]) -> None:
    """All threads of a process; those that it starts later follow."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


async def bench(model: str, runs: int) -> list[Figure]:
    """Measures, plays and simulates one model, on a mesh of its own."""
    settings = bench_settings(model)
    vocabulary = load_catalog(settings)[model].tokenizer.vocab_size
    pairs: list[Pair] = []
    async with (
        mesh_of(settings) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
        DirectWorker(mesh.worker_address(model), model) as worker,
    ):
        load = OpenLoad(inference_pb2_grpc.InferenceServiceStub(channel), model)
        with engine_alone(mesh):
            capacity = await capacity_per_s(load, SLOTS[model])
            for seed in range(1, runs + 1):
                setup = await measured_setup(load, worker, settings, vocabulary)
                pairs.append(await play(load, setup, SHARE * capacity, seed))
    return [_figure(model, pairs)]


async def main(args: argparse.Namespace) -> None:
    """Runs the models asked for and prints."""
    figures = []
    for model in args.model or MODELS:
        figures += await bench(model, args.runs)
    emit(figures, args.json)


if __name__ == "__main__":
    parser = options_of(__doc__, "traces at each load")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    uvloop.run(main(parser.parse_args()))
