"""Cost of telemetry: in throughput of a whole mesh, and of the gateway's part of it per request.

Of the part `mesh`, defined in bench/support/telemetry_cost.py: `traced_vs_untraced`, `traced_vs_untraced_one_token`,
`metrics_vs_none`. Of the part `parts`, with a metrics reader attached:

`request_metrics_us`: counting one answered request; the peer calls an instrument of OpenTelemetry for each of its seven
facts. `drift_feed_us`: one prediction of a learned router into its monitor, judgements included; the peer is one call.
`scrape_ms`: one scrape of a gateway with ten models over HTTP; the peer is prometheus_client, which makes the same.
`top_core_percent`: see bench/support/top_cost.py.

    python bench/telemetry.py [--json] [--runs N] [--seconds S] [mesh] [parts]
"""

import argparse
import asyncio
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import uvloop
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import SpanContext, TraceFlags
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

sys.path.insert(0, str(Path(__file__).parents[1]))

from batcher.metrics import BatcherMetrics
from bench.support.harness import MIN_RUNS, Figure, Run, compare, emit, run_count
from bench.support.telemetry_cost import telemetry_cost
from bench.support.top_cost import top_cost
from gateway.routing.prediction import PROMPT, HeadKey, HeadScore
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from sluice.settings.routing import DriftSettings
from sluice.telemetry import names
from sluice.telemetry.catalog import SECONDS, Kind, Metric
from sluice.telemetry.page import serving
from sluice.telemetry.registry import MetricRegistry, Point, Series
from sluice.v1.admin_pb2 import ModelAttempt, RequestRecord
from sluice.v1.inference_pb2 import FINISH_REASON_STOP

COUNT: Final = 20_000
SCRAPES: Final = 20
LABELS: Final = {
    names.GEN_AI_RESPONSE_MODEL: [f"model-{number}" for number in range(10)],
    names.PRIORITY_CLASS: ["interactive", "standard", "bulk"],
    names.OUTCOME: ["stop", "length", "CANCELLED", "OVERLOADED", "DEADLINE_PASSED"],
    names.ERROR_REASON: ["", "CANCELLED", "OVERLOADED", "DEADLINE_PASSED"],
    names.GEN_AI_TOKEN_TYPE: ["input", "output"],
}
"""The values of labels that have several."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of a run of a whole mesh, and of sluice top"
    )
    parser.add_argument("part", nargs="*", choices=("mesh", "parts", []), default=[])
    options = parser.parse_args()
    parts = options.part or ("mesh", "parts")
    found = asyncio.run(figures(options.runs, options.seconds)) if "parts" in parts else []
    if "mesh" in parts:
        found += uvloop.run(telemetry_cost(options.runs, options.seconds))
    emit(found, options.json)


async def figures(runs: int, seconds: float) -> list[Figure]:
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
        await scrape(runs),
        await top_cost(runs, seconds, [filled(RequestMetrics), filled(BatcherMetrics)]),
    ]


async def scrape(runs: int) -> Figure:
    registry = filled(RequestMetrics)
    families = CollectorRegistry()
    families.register(Families(registry))
    with serving(registry, {"service_name": "bench"}, "127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}/metrics"

        def ours() -> int:
            with urllib.request.urlopen(url, timeout=10) as response:
                return len(response.read())

        return await compare(
            "scrape_ms",
            partial(asyncio.to_thread, per_scrape, ours),
            partial(asyncio.to_thread, per_scrape, lambda: len(generate_latest(families))),
            unit="ms",
            higher_is_better=False,
            note=f"{ours() / 1e3:.0f} kB; {SCRAPES} scrapes a run",
            runs=runs,
        )


def per_scrape(one: Callable[[], int]) -> float:
    """The mean of some scrapes, milliseconds."""
    start = time.perf_counter()
    for _ in range(SCRAPES):
        one()
    return (time.perf_counter() - start) / SCRAPES * 1e3


def filled(metrics: Callable[[MetricRegistry], object]) -> MetricRegistry:
    """The metrics of a process with a value for each combination of `LABELS`."""
    known, registry = MetricRegistry(), MetricRegistry()
    metrics(known)
    for metric in known.metrics:
        every = list(product(*(LABELS.get(label, ["one"]) for label in metric.labels)))
        if metric.kind is Kind.HISTOGRAM:
            histogram = registry.histogram(metric)
            for labels, value in product(every, metric.bounds):
                histogram.record(labels, value)
        else:
            registry.counter(metric).update(dict.fromkeys(every, 1234.5))
    return registry


class Families(Collector):
    """A registry's values as prometheus_client's."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._families = [self._family(*one) for one in registry.collect()]

    def collect(self) -> Iterator[Family]:
        """Gives all."""
        yield from self._families

    @staticmethod
    def _family(metric: Metric, points: list[Point]) -> Family:
        family = Family(metric.page_name, metric.what, metric.kind.value)
        for values, value in points:
            labels = dict(zip(metric.page_labels, values, strict=True))
            if isinstance(value, Series):
                counts = accumulate(value.counts)
                for bound, count in zip((*metric.bounds, "+Inf"), counts, strict=True):
                    sample = {**labels, "le": str(bound)}
                    family.add_sample(f"{metric.page_name}_bucket", sample, count)
                family.add_sample(f"{metric.page_name}_sum", labels, value.total)
            else:
                family.add_sample(f"{metric.page_name}_total", labels, value)
        return family


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
