"""The pages of a running mesh: every metric of a request is there, the workers' too, and leads to its trace."""

import asyncio
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from sluice.telemetry.catalog import METRICS
from tests.mesh.test_traces import ask
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

WAIT_S = 60.0
SEEN = {
    "sluice.requests", "sluice.tokens", "gen_ai.server.time_to_first_token",
    "gen_ai.server.time_per_output_token", "gen_ai.server.request.duration",
    "sluice.routes", "sluice.requests.running", "sluice.queue.tasks", "sluice.queue.oldest_age",
    "sluice.queue.wait", "sluice.batches",
    "sluice.batch.rows", "sluice.batch.tokens", "sluice.rows.in_flight", "sluice.rows", "sluice.worker.live",
    "sluice.worker.kv_cache.usage", "sluice.worker.step.duration", "sluice.worker.step.rows",
    "sluice.worker.tokens", "sluice.worker.prefix_cache.hits",
    "sluice.worker.preemptions", "otel.sdk.exporter.span.exported",
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
    wanted, texts = {METRICS[name].page_name for name in SEEN}, [""]
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
