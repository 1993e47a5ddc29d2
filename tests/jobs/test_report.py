"""The report of a job that is over."""

import pytest

from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes, lines


async def test_the_report_says_what_the_job_took_and_what_the_prefix_cache_gave(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.cached_tokens = 1
    await processes.start()

    job = await processes.ended((await processes.create(lines(20))).id)

    report = job.report
    assert (report.progress.prompt_tokens, report.progress.cached_prompt_tokens) == (40, 20)
    assert report.progress.succeeded == 20
    assert report.running_time.ToMilliseconds() > 0
    assert report.items_per_second == pytest.approx(
        20e3 / report.running_time.ToMilliseconds(), rel=0.1
    )
