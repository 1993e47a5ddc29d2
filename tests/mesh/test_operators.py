"""What operators see of a running mesh, and what they do to it, through a real gateway, batcher and worker."""

import asyncio

import pytest

from sluice.cli.requests import ROWS_OF_WORKER, rows_in
from sluice.cli.top_view import WANTED, Choice, Sample, View, lines
from sluice.client import AsyncClient
from sluice.errors import Cancelled
from sluice.telemetry import catalog
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

WAIT_S = 60.0


async def test_a_running_request_is_seen_and_cancelled_and_a_worker_is_drained(
    mesh: RunningMesh,
) -> None:
    async with AsyncClient(mesh.address, tenant="acme") as client, asyncio.timeout(WAIT_S):
        stream = client.generate("hello", model="small", min_tokens=900, max_tokens=1000)
        started = await anext(stream)
        (running,) = (await client.requests(tenant="acme")).requests
        assert running.request_id == started.request_id
        (worker,) = workers_of(await sample(client), "small")
        found = await client.metrics(*ROWS_OF_WORKER)
        assert rows_in(found, "small", worker) >= 0
        drained = await client.drain_worker("small", worker)
        try:
            assert f"small {worker}" in drained.drained
            while not (await sample(client)).now(catalog.WORKER_DRAINED)["small", worker]:
                pass
            # What is in the worker goes on.
            assert (await client.requests(tenant="acme")).requests
        finally:
            assert not (await client.drain_worker("small", worker, undo=True)).drained
        await client.cancel_requests(running.request_id)
        with pytest.raises(Cancelled, match="operator"):
            await stream.answer()
        while not (await ready(client)):
            pass
        shown = lines("top", View(await sample(client), None, None), Choice(), 80, 24)
        assert any("small" in line and "live" in line for line in shown)


async def sample(client: AsyncClient) -> Sample:
    read = await client.metrics(*(metric.name for metric in WANTED))
    return Sample.of(asyncio.get_running_loop().time(), read, await client.requests(limit=0))


def workers_of(found: Sample, model: str) -> list[str]:
    return [worker for name, worker in found.now(catalog.WORKER_LIVE) if name == model]


async def ready(client: AsyncClient) -> bool:
    return all(model.ready for model in await client.list_models() if model.name == "small")
