"""Memory of every process of the mesh over many requests: 32 callers in closed loop, short answers of the echo engine.

Prints the resident memory of each process at intervals and, after one round to warm up, its growth per 1,000 requests
with the 95 % confidence interval of the slope. What the mesh keeps by design is bounded by settings, and the bounds are
set so low here that the first round reaches them: `records.max_mib` 8 (NATS holds an index of the records in memory,
about 0.3 KB each), and replays of idempotency keys (none here).

    scripts/robustness soak [--json] [--runs ROUNDS]    a round has 20,000 requests: 5 rounds are 100,000, 50 a million
"""

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.support.harness import MIN_RUNS, Figure, emit, machine
from sluice import settings as config
from sluice.settings import RecordsSettings
from sluice.settings.routing import RoutingSettings
from sluice.v1 import inference_pb2, inference_pb2_grpc
from supervisor.mesh import running_mesh
from tests.robustness.mesh_memory import memory_of

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

ROUND: Final = 20_000
"""Requests."""
SAMPLES: Final = 10
"""Of a round."""
CALLERS: Final = 32
MODEL: Final = "echo"
TOKENS: Final = 4
CALL_S: Final = 60.0
_T95: Final = 2.0
"""Of Student's distribution, for the tens of samples of a run."""


@dataclass(frozen=True)
class Growth:
    """A line through samples of memory, KiB per 1,000 requests."""

    slope: float
    half_width: float
    """Of the 95 % confidence interval."""


@dataclass
class Samples:
    """Resident memory by process, in KiB, after each number of requests."""

    requests: list[int] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    refused: int = 0
    """Requests that got UNAVAILABLE."""

    def add(self, requests: int, memory: Mapping[str, float]) -> None:
        self.requests.append(requests)
        for name, kib in memory.items():
            self.memory.setdefault(name, []).append(kib)

    def growth(self, name: str, after: int) -> Growth:
        """Of one process, after ``after`` requests."""
        points = zip(self.requests, self.memory[name], strict=True)
        return growth([(count, kib) for count, kib in points if count >= after])


def growth(points: Sequence[tuple[int, float]]) -> Growth:
    """The line of least squares through requests and KiB."""
    xs, ys = [count / 1000 for count, _ in points], [kib for _, kib in points]
    slope, intercept = linear_regression(xs, ys)
    residue = sum((y - slope * x - intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    mean = sum(xs) / len(xs)
    error = math.sqrt(residue / max(1, len(xs) - 2) / sum((x - mean) ** 2 for x in xs))
    return Growth(slope, _T95 * error)


def soak_settings() -> config.Settings:
    """One echo model, and as little kept as the settings allow."""
    return config.Settings(
        models=(
            config.ModelSettings(name=MODEL, path="builtin:small", engine="echo", slots=CALLERS),
        ),
        routing=RoutingSettings(default=MODEL),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
        records=RecordsSettings(max_mib=8),
    )


async def soak(
    stub: "Stub", requests: int, take: Callable[[int], Mapping[str, float]], every: int
) -> Samples:
    """Sends ``requests`` requests; ``take`` takes a sample at the beginning and after ``every`` requests."""
    samples, numbers = Samples(), iter(range(1, requests + 1))
    samples.add(0, take(0))

    async def caller() -> None:
        for number in numbers:
            try:
                async for _ in stub.Generate(_request(number), timeout=CALL_S):
                    pass
            except (
                grpc.aio.AioRpcError
            ) as error:  # on a busy machine a worker may be taken for lost
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                samples.refused += 1
                await asyncio.sleep(1)
            if number % every == 0:
                samples.add(number, take(number))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return samples


def _request(number: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=f"request {number} of many",
        model=MODEL,
        sampling=inference_pb2.SamplingParams(max_tokens=TOKENS),
    )


def figures(samples: Samples) -> list[Figure]:
    """The growth of each process."""
    last = samples.requests[-1]
    return [_figure(samples, name, last) for name in samples.memory]


def _figure(samples: Samples, name: str, last: int) -> Figure:
    memory, grown = samples.memory[name], samples.growth(name, min(ROUND, last // 2))
    note = (
        f"{name}: {grown.slope:+.1f} ± {grown.half_width:.1f} KiB per 1,000 requests over {last:,} requests, the first"
        f" {min(ROUND, last // 2):,} not counted; {memory[0] / 1024:.0f} MiB at start, {memory[-1] / 1024:.0f} MiB at"
        f" the end; {CALLERS} callers in closed loop, answers of {TOKENS} tokens; {samples.refused} refused"
    )
    unit = "KiB per 1,000 requests"
    figure = f"soak_growth_{name.replace('-', '_')}"
    return Figure(figure, grown.slope, None, None, unit, len(memory), machine(), note)


def _show(count: int, memory: Mapping[str, float]) -> None:
    if count == 0:
        print("".join(f"{name:>18}" for name in ("requests", *memory)))
    cells = "".join(f"{kib / 1024:14.1f} MiB" for kib in memory.values())
    print(f"{count:18,}{cells}", flush=True)


async def main(args: argparse.Namespace) -> None:
    """Runs the rounds and prints what each process holds."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with (
            running_mesh(soak_settings(), state_dir=Path(folder)) as mesh,
            grpc.aio.insecure_channel(mesh.address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)

            def take(count: int) -> Mapping[str, float]:
                memory = memory_of(mesh)
                if not args.json:
                    _show(count, memory)
                return memory

            samples = await soak(stub, args.runs * ROUND, take, ROUND // SAMPLES)
    emit(figures(samples), args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=int, default=MIN_RUNS, help="rounds of 20,000 requests")
    uvloop.run(main(parser.parse_args()))
