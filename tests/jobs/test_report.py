"""The report of a job that is over."""

import pytest

from sluice.internal.v1.items_pb2 import ItemWork
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes, lines


async def test_report_has_usage_and_prefix_cache_savings(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.cached_tokens = 1
    await processes.start()

    job = await processes.ended((await processes.create(lines(20))).id)

    report = job.report
    assert (report.progress.prompt_tokens, report.progress.cached_prompt_tokens) == (40, 20)
    assert report.progress.succeeded == 20
    assert job.progress.items_per_second > 0
    assert report.running_time.ToMilliseconds() > 0
    assert report.items_per_second == pytest.approx(
        20e3 / report.running_time.ToMilliseconds(), rel=0.1
    )


async def test_report_has_busy_and_padding_shares(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.work = ItemWork(worker="w1", tokens=30, cells=40, computing_ms=5)
    await processes.start()

    job = await processes.ended((await processes.create(lines(20))).id)

    assert job.report.padding_share == 0.25
    assert 0 < job.report.workers_busy_share <= 1


async def test_report_without_workers_has_no_shares(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    report = (await processes.ended((await processes.create(lines(2))).id)).report
    assert not report.HasField("padding_share")
    assert not report.HasField("workers_busy_share")
