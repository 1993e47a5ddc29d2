"""The pages of a running mesh: every metric of a request is there, the workers' too, and leads to its trace."""

import asyncio
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from sluice.telemetry import catalog
from tests.mesh.test_traces import ask
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

WAIT_S = 60.0
SEEN = {
    catalog.REQUESTS, catalog.TOKENS, catalog.FIRST_TOKEN, catalog.TOKEN_TIME, catalog.DURATION,
    catalog.ROUTES, catalog.RUNNING, catalog.QUEUED, catalog.OLDEST, catalog.QUEUE_WAIT, catalog.BATCHES,
    catalog.BATCH_ROWS, catalog.BATCH_TOKENS, catalog.IN_FLIGHT, catalog.ROWS, catalog.WORKER_LIVE,
    catalog.WORKER_CACHE, catalog.STEP_TIME, catalog.STEP_ROWS, catalog.WORKER_TOKENS, catalog.PREFIX_HITS,
    catalog.PREEMPTIONS, catalog.SPANS,
}  # fmt: skip
"""Metrics that have a value after one answer, without a fault."""


def read(page: str | None) -> str:
    accept = {"Accept": "application/openmetrics-text"}
    request = urllib.request.Request(f"http://{page}/metrics", headers=accept)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


async def test_an_answer_is_on_the_pages_of_gateway_and_batcher(mesh: RunningMesh) -> None:
    started = await ask(mesh, "classify: the lid is cracked")
    pages = mesh.settings.telemetry.prometheus
    wanted, texts = {one.page_name for one in SEEN}, [""]
    async with asyncio.timeout(WAIT_S):
        while True:  # The worker's counts come with its next heartbeat.
            texts = [
                await asyncio.to_thread(read, page) for page in (pages["gateway"], pages["batcher"])
            ]
            families = [one for text in texts for one in text_string_to_metric_families(text)]
            counted = [
                s for one in families for s in one.samples if s.name.endswith("step_rows_total")
            ]
            if wanted <= {one.name for one in families} and any(s.value for s in counted):
                break
    assert all(f'trace_id="{started.trace_id}"' in text for text in texts)
