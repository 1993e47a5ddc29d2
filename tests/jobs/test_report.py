"""What the report of a job that is over says of the mesh."""

from collections.abc import Iterator

import pytest

from sluice.telemetry import catalog
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.admin_pb2 import MetricPoint, MetricSeries, ProcessMetrics
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes, lines


def readings(gateway: GatewayDouble) -> Iterator[list[ProcessMetrics]]:
    """A worker of the job's model that is always busy, a batcher with a quarter of padding, and another model's."""
    for number in range(1000):
        values = {
            (catalog.WORKER_LIVE, ("echo", "w0")): 1.0,
            (catalog.STEP_TIME, ("echo", "w0")): 1e6 * number,
            (catalog.BATCH_TOKENS, ("echo",)): 300.0 * number,
            (catalog.PADDING_TOKENS, ("echo",)): 100.0 * number,
            (catalog.PADDING_TOKENS, ("other",)): 9e9 * number,
        }
        gateway.hold.set()  # from the first reading on
        series = [
            MetricSeries(name=metric.name, points=[MetricPoint(labels=labels, value=value)])
            for (metric, labels), value in values.items()
        ]
        yield [ProcessMetrics(service="batcher", instance="b0", metrics=series)]


async def test_the_report_has_what_workers_did_and_what_the_prefix_cache_gave(
    processes: Processes, gateway: GatewayDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.runner.LONG_MS", -1)
    gateway.hold.clear()
    gateway.metrics, gateway.cached_tokens = readings(gateway), 1
    await processes.start()

    job = await processes.ended((await processes.create(lines(20))).id)

    report = job.report
    assert report.workers_busy_share == pytest.approx(1.0)
    assert report.padding_share == pytest.approx(0.25)
    assert (report.progress.prompt_tokens, report.progress.cached_prompt_tokens) == (40, 20)
    assert report.progress.succeeded == 20
    assert report.running_time.ToMilliseconds() > 0
    assert report.items_per_second == pytest.approx(
        20e3 / report.running_time.ToMilliseconds(), rel=0.1
    )


async def test_a_short_job_says_nothing_of_what_was_not_measured(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await processes.ended((await processes.create(lines(3))).id)

    assert job.state == pb.JOB_STATE_COMPLETED
    assert not job.report.HasField("workers_busy_share")
    assert not job.report.HasField("padding_share")
