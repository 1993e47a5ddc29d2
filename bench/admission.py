"""Predicted times of calls in open loop, and the calls that are refused because of them.

    python bench/admission.py [--json] [--runs N] [--load SHARE] [--seconds S]

Error of predictions, on a mesh: one model of `SLOTS` slots whose engine takes `STEP_MS` a step and computes nothing,
all else as shipped. Calls come at random (Poisson): half interactive, 30 % standard, 20 % bulk, prompts of `PROMPT` and
answers of `ANSWER` tokens, which ``min_tokens`` and ``max_tokens`` fix; each has `TIMEOUT_S` seconds. Capacity is what
`WAITING` waiting calls for each slot get answered in `FLOOD_S`. A round plays a trace of ``--seconds`` with a seed of
its own at each share of the capacity in `LOADS`. What was predicted when a call was sent is in its record.

`prediction_error`: of a round the largest of the medians of |predicted / actual - 1| at 60, 90 and 120 %, each over the
calls that ended complete and whose row waited for at least 50 ms; refused and late calls have no actual time. Peer: the
bound, 25 %. `also` has the median over rounds of each load, and at 30 %, where almost no call waits, the median of
|predicted - actual| over all complete calls; further how many calls were judged, refused, late and sent at each load,
over all rounds.

Refused calls, in simulation (`simulator`, the same model and mix with answers that end by themselves below
``max_tokens``, `SIMULATED_S` seconds, a seed a round): up to `REPLAYS` of them a round and load, evenly chosen, are
each replayed. The whole trace runs again, and this one call is not refused. `also` has the share that is late then, its
deadline passed or the answer after it, over all rounds: `refused_late_at_90` and `refused_late_at_120`.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, emit, machine, options_of, paired
from bench.support.meshes import echo, mesh_of, mesh_settings
from bench.support.open_load import DIGITS, PRIORITIES
from gateway.telemetry.metrics import PREDICTED_WAIT_MS
from simulator.arrivals import generate, parse_stream
from simulator.cost import StepCost
from simulator.engines import EngineLimits
from simulator.results import Ending, RequestOutcome
from simulator.simulator import Setup, simulate
from simulator.trace import Arrival
from sluice.settings.batching import Policy
from sluice.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from sluice.wire.clock import ms_of

SLOTS: Final = 4
STEP_MS: Final = 20.0
LOADS: Final = (0.3, 0.6, 0.9, 1.2)
LOW: Final = 0.3
ERROR_MAX: Final = 0.25
TIMEOUT_S: Final = 3.0
CLASSES: Final = {"interactive": 0.5, "standard": 0.3, "bulk": 0.2}
PROMPT: Final = "uniform/20/300"
ANSWER: Final = "uniform/4/60"
NATURAL: Final = "lognormal/30/0.3/120,max_tokens=120"
WAITING: Final = 3
FLOOD_S: Final = 8.0
SECONDS: Final = 20.0
RECORDS_AT_ONCE: Final = 32
RECORD_TRIES: Final = 50
RECORD_PAUSE_S: Final = 0.1
SIMULATED_S: Final = 60.0
REPLAYS: Final = 10
LATE: Final = (Ending.EXPIRED, Ending.OPEN)


@dataclass
class Round:
    """What the calls of one trace came to.

    Attributes:
        errors: relative errors of calls that waited.
        errors_s: absolute errors of all.
        actual_s: the times that they took.
    """

    sent: int = 0
    refused: int = 0
    late: int = 0
    errors: list[float] = field(default_factory=list)
    errors_s: list[float] = field(default_factory=list)
    actual_s: list[float] = field(default_factory=list)


def mix(rate: float, seconds: float, seed: int, answer: str = ANSWER) -> list[Arrival]:
    """Return calls of all classes, ``rate`` a second."""
    streams = [
        parse_stream(
            f"poisson:rate={share * rate},class={name},prompt={PROMPT},answer={answer},timeout_s={TIMEOUT_S}"
        )
        for name, share in CLASSES.items()
    ]
    return generate(streams, seconds, seed)


class Caller:
    """Calls one model of one gateway, and reads the records of the calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        self._chance = Random(1)
        self._reading = asyncio.Semaphore(RECORDS_AT_ONCE)

    async def capacity(self, seed: int) -> float:
        """Return the answers a second while calls wait for each slot."""
        arrivals, until = iter(mix(200.0, 60.0, seed)), time.monotonic() + FLOOD_S
        answered = 0

        async def one_after_the_other() -> None:
            nonlocal answered
            for arrival in arrivals:
                ended = await self.ask(replace(arrival, priority_class="standard", timeout_s=60.0))
                if time.monotonic() > until:
                    return
                answered += ended is not None

        await asyncio.gather(*(one_after_the_other() for _ in range(WAITING * SLOTS)))
        return answered / FLOOD_S

    async def play(self, trace: Sequence[Arrival]) -> Round:
        """Send all of a trace in open loop."""
        begun, found = time.monotonic(), Round(sent=len(trace))
        calls = []
        for arrival in trace:
            await asyncio.sleep(max(0.0, begun + arrival.at_s - time.monotonic()))
            calls.append(asyncio.create_task(self.ask(arrival, found)))
        names = [name for name in await asyncio.gather(*calls) if name is not None]
        await asyncio.gather(*(self._judge(name, found) for name in names))
        return found

    async def ask(self, arrival: Arrival, found: Round | None = None) -> str | None:
        """Send a call now; return the id of the request if it was answered."""
        tokens, timeout_s = arrival.max_tokens, arrival.timeout_s
        request = inference_pb2.GenerateRequest(
            prompt="".join(self._chance.choices(DIGITS, k=arrival.prompt_tokens)),
            raw_prompt=True,
            model="echo",
            priority=PRIORITIES[arrival.priority_class],
            sampling=inference_pb2.SamplingParams(max_tokens=tokens, min_tokens=tokens),
        )
        try:
            answer = await self._inference.GenerateText(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if found is not None:
                refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                found.refused += refused
                found.late += not refused
            return None
        return str(answer.started.request_id)

    async def _judge(self, name: str, found: Round) -> None:
        """Compare what was predicted of an answered call with what it took."""
        record = await self._record(name)
        (attempt,) = record.attempts
        if not attempt.HasField("expected_time"):
            return
        timings = record.timings
        before_ms = sum(
            ms_of(getattr(timings, hop)) for hop in ("admission", "safety", "route", "tokenize")
        )
        actual_s = (ms_of(timings.total) - before_ms) / 1e3
        expected_s = ms_of(attempt.expected_time) / 1e3
        found.actual_s.append(actual_s)
        found.errors_s.append(abs(expected_s - actual_s))
        if ms_of(attempt.queue_wait) >= PREDICTED_WAIT_MS:
            found.errors.append(abs(expected_s / actual_s - 1))

    async def _record(self, name: str) -> admin_pb2.RequestRecord:
        """Return the record of a request, which is written a moment after its end."""
        request = admin_pb2.GetRequestRecordRequest(request_id=name)
        async with self._reading:
            for _ in range(RECORD_TRIES):
                try:
                    found: admin_pb2.GetRequestRecordResponse
                    found = await self._admin.GetRequestRecord(request)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.NOT_FOUND:
                        raise
                    await asyncio.sleep(RECORD_PAUSE_S)
                else:
                    return found.record
        raise TimeoutError(f"no record of {name}")


async def measured(loads: Sequence[float], runs: int, seconds: float) -> dict[float, list[Round]]:
    """Play the traces of all rounds, each at all loads."""
    rounds: dict[float, list[Round]] = {load: [] for load in loads}
    settings = mesh_settings(echo(SLOTS, echo_step_ms=STEP_MS))
    async with (
        mesh_of(settings) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
    ):
        caller = Caller(channel)
        for seed in range(1, runs + 1):
            capacity = await caller.capacity(seed)
            for load in loads:
                found = await caller.play(mix(load * capacity, seconds, seed))
                rounds[load].append(found)
                print(f"{load:.0%} of {capacity:.1f}/s: {summary([found])}", file=sys.stderr)
    return rounds


def summary(rounds: Iterable[Round]) -> dict[str, float]:
    """Return the numbers of calls over several rounds."""
    rounds = list(rounds)
    return {
        "judged": sum(len(one.errors) for one in rounds),
        "refused": sum(one.refused for one in rounds),
        "late": sum(one.late for one in rounds),
        "sent": sum(one.sent for one in rounds),
    }


def replayed(load: float, seed: int) -> list[bool]:
    """Return of refused calls whether each is late when it is not refused, in simulation."""
    setup = Setup(
        policy=Policy(),
        cost=StepCost(STEP_MS / 1e3, 0.0, 0.0, 0.0),
        limits=EngineLimits(slots=SLOTS),
        admission=True,
    )
    mean = statistics.fmean(one.answer_tokens for one in mix(100.0, 60.0, 0, NATURAL))
    trace = mix(load * SLOTS / (mean * STEP_MS / 1e3), SIMULATED_S, seed, NATURAL)
    outcomes = simulate(trace, setup).outcomes
    refused = [number for number, one in enumerate(outcomes) if one.ending is Ending.REFUSED]
    late = []
    for number in refused[:: max(1, len(refused) // REPLAYS)][:REPLAYS]:
        again = simulate(trace, replace(setup, never_refused=frozenset([number])))
        late.append(is_late(again.outcomes[number]))
    print(
        f"{load:.0%}, seed {seed}: {sum(late)} of {len(late)} late, {len(refused)} refused",
        file=sys.stderr,
    )
    return late


def is_late(outcome: RequestOutcome) -> bool:
    """Whether a call that was not refused was too late."""
    latency_s = outcome.latency_s
    return outcome.ending in LATE or (latency_s is not None and latency_s > TIMEOUT_S)


def figure(rounds: Mapping[float, Sequence[Round]], late: Mapping[str, float]) -> Figure:
    """Return the figure of all loads; ``late``: further values."""
    high = [load for load in rounds if load != LOW]
    also = dict(late)
    for load, found in rounds.items():
        percent = round(100 * load)
        also |= {f"{key}_at_{percent}": value for key, value in summary(found).items()}
        if load == LOW and (errors_s := [s for one in found for s in one.errors_s]):
            also[f"absolute_at_{percent}_ms"] = 1e3 * statistics.median(errors_s)
        medians = [statistics.median(one.errors) for one in found if one.errors]
        if load != LOW and medians:
            also[f"error_at_{percent}_share"] = statistics.median(medians)
    ours = [
        max(statistics.median(one.errors) for one in at_once if one.errors)
        for at_once in zip(*(rounds[load] for load in high), strict=True)
        if any(one.errors for one in at_once)
    ]
    name, note = "prediction_error", f"{SLOTS} slots of {STEP_MS:g} ms a step; peer: the bound"
    if not ours:
        return Figure(name, None, None, None, "share", 0, machine(), f"{note}; no call waited")
    peer = [ERROR_MAX] * len(ours)
    return paired(name, ours, peer, unit="share", higher_is_better=False, note=note, also=also)


async def main(args: argparse.Namespace) -> None:
    """Measure all loads and print."""
    loads = args.load or LOADS
    rounds, late = await measured(loads, args.runs, args.seconds), dict[str, float]()
    for load in loads:
        judged = [one for seed in range(args.runs) for one in replayed(load, seed + 1)]
        if judged:
            late[f"refused_late_at_{round(100 * load)}"] = sum(judged) / len(judged)
    emit([figure(rounds, late)], args.json)


if __name__ == "__main__":
    parser = options_of(__doc__, "traces")
    parser.add_argument(
        "--load", type=float, action="append", choices=LOADS, help="only this share"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a trace")
    uvloop.run(main(parser.parse_args()))
