"""Cost of telemetry: in throughput of a whole mesh, and of the gateway's part of it per request.

Of the part `mesh`, defined in bench/support/telemetry_cost.py: `traced_vs_untraced`, `traced_vs_untraced_one_token`,
`metrics_vs_none`. Of the part `parts`, with a metrics reader attached:

`request_metrics_us`: counting one answered request; the peer calls an instrument of OpenTelemetry for each of its seven
facts. `drift_feed_us`: one prediction of a learned router into its monitor, judgements included; the peer is one call.

    python bench/telemetry.py [--json] [--runs N] [--seconds S] [mesh] [parts]
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import uvloop
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import SpanContext, TraceFlags

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import MIN_RUNS, Figure, Run, compare, emit, run_count
from bench.support.telemetry_cost import telemetry_cost
from gateway.routing.prediction import PROMPT, HeadKey, HeadScore
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from sluice.settings.routing import DriftSettings
from sluice.telemetry import names
from sluice.telemetry.catalog import SECONDS
from sluice.telemetry.registry import MetricRegistry
from sluice.v1.admin_pb2 import ModelAttempt, RequestRecord
from sluice.v1.inference_pb2 import FINISH_REASON_STOP

COUNT: Final = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run of a whole mesh")
    parser.add_argument("part", nargs="*", choices=("mesh", "parts"), default=["mesh", "parts"])
    options = parser.parse_args()
    found = asyncio.run(figures(options.runs)) if "parts" in options.part else []
    if "mesh" in options.part:
        found += uvloop.run(telemetry_cost(options.runs, options.seconds))
    emit(found, options.json)


async def figures(runs: int) -> list[Figure]:
    return [
        await compare(
            "request_metrics_us",
            run(counting()),
            run(instruments(7)),
            unit="us",
            higher_is_better=False,
            note=f"{COUNT} requests a run; the peer is seven instrument calls",
            runs=runs,
        ),
        await compare(
            "drift_feed_us",
            run(feeding()),
            run(instruments(1)),
            unit="us",
            higher_is_better=False,
            note=f"{COUNT} predictions a run; the peer is one instrument call",
            runs=runs,
        ),
    ]


def run(one: Callable[[], None]) -> Run:
    """The mean of many calls, microseconds."""

    async def measured() -> float:
        start = time.perf_counter()
        for _ in range(COUNT):
            one()
        return (time.perf_counter() - start) / COUNT * 1e6

    return measured


def new_meter() -> Meter:
    return MeterProvider([InMemoryMetricReader()]).get_meter("bench")


def counting() -> Callable[[], None]:
    metrics = RequestMetrics(MetricRegistry())
    request: Any = SimpleNamespace(
        priority_class="interactive", conversation=SimpleNamespace(raw=False)
    )
    assembler = SimpleNamespace(recoveries=0)
    attempt = SimpleNamespace(
        model="small",
        billed_tokens=(20, 40),
        completion_tokens=40,
        resumed=0,
        escalation_reason="",
        assembler=assembler,
    )
    stream: Any = SimpleNamespace(
        current=attempt,
        attempts=(attempt,),
        error=None,
        finished=SimpleNamespace(reason=FINISH_REASON_STOP),
        first_token_s=0.05,
        first_token_at=time.monotonic(),
        spec=SimpleNamespace(timings=SimpleNamespace(arrived_at=time.monotonic())),
    )
    plan: Any = SimpleNamespace(model="small", strategy="rules", degraded=False)
    record = RequestRecord(attempts=[ModelAttempt(model="small", cost=0.1)], currency="USD")
    flags = TraceFlags(TraceFlags.SAMPLED)
    span = SpanContext(1, 2, is_remote=False, trace_flags=flags)
    return lambda: metrics.count_stream(request, plan, stream, record, span)


def feeding() -> Callable[[], None]:
    by = HeadKey("routing", "0123456789ab", PROMPT)
    draw = np.random.default_rng(0)
    drift = DriftMonitor("gw", lambda event: None, MetricRegistry())
    drift.use({by: draw.normal(0.1, 0.1, 1500).astype(np.float32)}, DriftSettings())
    scores = iter([HeadScore(by, gain, {}) for gain in draw.normal(0.1, 0.1, COUNT * 100).tolist()])
    return lambda: drift.scored(next(scores))


def instruments(count: int) -> Callable[[], None]:
    histogram = new_meter().create_histogram(
        names.GEN_AI_TTFT, "s", explicit_bucket_boundaries_advisory=SECONDS
    )

    def call() -> None:
        for _ in range(count):
            histogram.record(
                0.05, {names.GEN_AI_RESPONSE_MODEL: "small", names.PRIORITY_CLASS: "interactive"}
            )

    return call


if __name__ == "__main__":
    main()
