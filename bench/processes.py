"""What a request costs each process of the mesh in processor time: `simulator/fleet.py` has it for `sluice plan`.

    python bench/processes.py [--json] [--runs N]

`process_cost_NAME`, microseconds: ours is a request with one token of answer, median over rounds; `also` has the fit.
A round asks for `REQUESTS` bulk answers of each length of `TOKENS` for each of `CALLERS` callers, from the `echo`
engine, so that what a model computes counts nowhere. triton is tritonserver with the model's process. Processor time
hardly depends on what else runs on the machine; how many requests share a wake-up does. There is no peer.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, emit, machine, options_of
from bench.support.load import processes_of
from bench.support.meshes import echo, mesh_of, mesh_settings
from bench.support.open_load import OpenLoad
from simulator.fleet import SHIPPED
from simulator.trace import Arrival
from sluice.v1 import inference_pb2_grpc
from supervisor.mesh import Mesh

CALLERS: Final = 32
REQUESTS: Final = 32
TOKENS: Final = (1, 32, 64)
PROMPT: Final = 100


def used_s(mesh: Mesh) -> dict[str, float]:
    """Seconds of processor time by kind of process."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, process in processes_of(mesh).items():
        found[name.split("/")[0].split("-")[0]] += sum(process.cpu_times()[:2])
    return {name: found[name] for name in SHIPPED}


async def round_us(mesh: Mesh, load: OpenLoad, tokens: int) -> dict[str, float]:
    """Microseconds of a request, by process."""
    arrival = Arrival(0.0, PROMPT, tokens, tokens, "bulk")
    before = used_s(mesh)
    answered = await load.repeat(arrival, CALLERS, REQUESTS)
    after = used_s(mesh)
    assert answered, "no request was answered"
    return {name: (after[name] - before[name]) / answered * 1e6 for name in after}


async def bench(runs: int) -> list[Figure]:
    async with (
        mesh_of(mesh_settings(echo(CALLERS))) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
    ):
        load = OpenLoad(inference_pb2_grpc.InferenceServiceStub(channel), "echo")
        await round_us(mesh, load, 1)  # warms up
        points = [
            (tokens, await round_us(mesh, load, tokens)) for _ in range(runs) for tokens in TOKENS
        ]
    return [_figure(name, [(t, us[name]) for t, us in points], runs) for name in points[0][1]]


def _figure(name: str, points: list[tuple[float, float]], runs: int) -> Figure:
    lengths, us = np.array(points).T
    solved, covariance = np.polyfit(lengths, us, 1, cov=True)
    errors = 1.96 * np.sqrt(np.diag(covariance))
    one = statistics.median(us for tokens, us in points if tokens == TOKENS[0])
    keys = ("token_us", "request_us", "token_error_us", "request_error_us")
    also = dict(zip(keys, map(float, (*solved.clip(0), *errors)), strict=True))
    return Figure(
        *(f"process_cost_{name}", one, None, None, "us", runs, machine()),
        f"{CALLERS} callers, {REQUESTS} bulk requests each, prompts of {PROMPT} tokens, echo engine",
        {"callers": CALLERS, "tokens": list(TOKENS), "prompt_tokens": PROMPT},
        also,
    )


def main() -> None:
    parser = options_of(__doc__, "rounds of all lengths")
    options = parser.parse_args()
    emit(uvloop.run(bench(options.runs)), options.json)


if __name__ == "__main__":
    main()
