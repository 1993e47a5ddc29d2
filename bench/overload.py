"""Overload: goodput at five times the peak load compared with the peak, and the latency of refusals.

Requests come by chance at a fixed mean rate, whatever becomes of them (open loop), each with a deadline. The engine is
`echo` with a fixed time a step, so the capacity of the workers is known and the cores are left to the mesh.

    python bench/overload.py [--json] [--runs N] [--seconds S]
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import MIN_RUNS, Figure, emit, machine, run_count
from sluice import settings as config
from sluice.settings.routing import RoutingSettings
from sluice.v1 import inference_pb2, inference_pb2_grpc
from supervisor.mesh import running_mesh

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

SLOTS = 16
STEP_MS = 20.0
ANSWER_TOKENS = 20
DEADLINE_S = 2.0
CAPACITY_PER_S = SLOTS / (ANSWER_TOKENS * STEP_MS / 1000)
"""Answers that the worker gives a second when all its slots are taken, 40."""
LOADS = (1.0, 1.5, 5.0)
"""Multiples of the capacity; the last one is the overload, the peak is the best of the others."""


def bench_settings() -> config.Settings:
    """One echo model whose worker has a known capacity."""
    model = config.ModelSettings(
        name="echo",
        path="builtin:small",
        engine="echo",
        slots=SLOTS,
        max_waiting_rows=SLOTS,
        echo_step_ms=STEP_MS,
    )
    return config.Settings(
        models=(model,),
        routing=RoutingSettings(default="echo"),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
    )


@dataclass
class Outcome:
    """The outcomes of the requests of one run; times in seconds."""

    asked: int = 0
    answered: int = 0
    late: int = 0
    refusals_s: list[float] = field(default_factory=list)
    lasted_s: float = 0.0

    @property
    def goodput_per_s(self) -> float:
        """Whole answers in time, a second."""
        return self.answered / self.lasted_s

    @property
    def refusal_p99_s(self) -> float:
        """Of all refusals."""
        return statistics.quantiles(self.refusals_s, n=100)[98]


class Load:
    """Sends requests at a rate."""

    def __init__(self, stub: "Stub", seed: int) -> None:
        self._stub = stub
        self._chance = random.Random(seed)

    async def run(self, rate: float, seconds: float) -> Outcome:
        """One run. The first `DEADLINE_S` seconds fill the queue and are not counted."""
        outcome, calls = Outcome(), set()
        begun = time.monotonic()
        counted_at, end = begun + DEADLINE_S, begun + DEADLINE_S + seconds
        due = begun
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            into = outcome if due >= counted_at else Outcome()
            call = asyncio.ensure_future(self._ask(into))
            calls.add(call)
            call.add_done_callback(calls.discard)
            due += self._chance.expovariate(rate)
        if calls:
            await asyncio.wait(calls)
        outcome.lasted_s = seconds
        return outcome

    async def _ask(self, outcome: Outcome) -> None:
        outcome.asked += 1
        start = time.perf_counter()
        request = inference_pb2.GenerateRequest(
            prompt="one two three",
            model="echo",
            sampling=inference_pb2.SamplingParams(max_tokens=ANSWER_TOKENS),
        )
        try:
            async for response in self._stub.Generate(request, timeout=DEADLINE_S):
                if response.HasField("finished"):
                    outcome.answered += 1
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                outcome.refusals_s.append(time.perf_counter() - start)
            else:
                outcome.late += 1


async def bench(stub: "Stub", runs: int, seconds: float) -> list[Figure]:
    """All loads in turn, ``runs`` times."""
    load = Load(stub, seed=1)
    await load.run(CAPACITY_PER_S, DEADLINE_S)  # The batcher learns how long answers take.
    outcomes: dict[float, list[Outcome]] = {multiple: [] for multiple in LOADS}
    for _ in range(runs):
        for multiple in LOADS:
            outcomes[multiple].append(await load.run(multiple * CAPACITY_PER_S, seconds))
    *calm, storm = (outcomes[multiple] for multiple in LOADS)
    return [_goodput(calm, storm, runs), _refusals(storm, runs)]


def _goodput(calm: list[list[Outcome]], storm: list[Outcome], runs: int) -> Figure:
    peaks = [max(outcome.goodput_per_s for outcome in round_) for round_ in zip(*calm, strict=True)]
    ours = statistics.median(outcome.goodput_per_s for outcome in storm)
    peak = statistics.median(peaks)
    late = sum(outcome.late for outcome in storm) / sum(outcome.asked for outcome in storm)
    note = (
        f"answers within {DEADLINE_S:g} s at {LOADS[-1]:g}x a capacity of {CAPACITY_PER_S:g}/s beside the best of"
        f" {' and '.join(f'{multiple:g}x' for multiple in LOADS[:-1])}; late of all asked: {late:.2%}"
    )
    return Figure(
        "goodput_at_5x_vs_peak", ours, peak, ours / peak, "answers/s", runs, machine(), note
    )


def _refusals(storm: list[Outcome], runs: int) -> Figure:
    ours = statistics.median(outcome.refusal_p99_s for outcome in storm) * 1000
    middle = statistics.median(time_s for outcome in storm for time_s in outcome.refusals_s) * 1000
    share = sum(len(o.refusals_s) for o in storm) / sum(o.asked for o in storm)
    note = (
        f"p99 at the client of one process, refused: {share:.0%} of"
        f" {LOADS[-1] * CAPACITY_PER_S:g}/s; median {middle:.2g} ms; bound: 10 ms"
    )
    return Figure("refusal_ms_p99", ours, None, None, "ms", runs, machine(), note)


async def main(args: argparse.Namespace) -> None:
    """Runs the figures and prints them."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with (
            running_mesh(bench_settings(), state_dir=Path(folder)) as mesh,
            grpc.aio.insecure_channel(mesh.address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            figures = await bench(stub, args.runs, args.seconds)
    emit(figures, args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS, help="rounds of all loads")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a run")
    uvloop.run(main(parser.parse_args()))
