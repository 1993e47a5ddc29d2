"""What operators see of a running mesh, and what they do to it, through a real gateway, batcher and worker."""

import asyncio

import pytest

from cli.requests import ROWS_OF_WORKER, rows_in
from cli.top import WANTED, Sample, View, lines
from sluice.client import AsyncClient, Finished
from sluice.errors import Cancelled
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

WAIT_S = 150.0


async def test_a_running_request_is_seen_and_cancelled(mesh: RunningMesh) -> None:
    async with AsyncClient(mesh.address, tenant="acme") as client, asyncio.timeout(WAIT_S):
        stream = client.generate("hello", model="small", min_tokens=900, max_tokens=1000)
        started = await anext(stream)
        (running,) = (await client.requests(tenant="acme")).requests
        assert running.request_id == started.request_id
        await client.cancel_requests(running.request_id)
        with pytest.raises(Cancelled, match="operator"):
            await stream.answer()


async def test_what_is_in_a_worker_that_is_drained_goes_on(mesh: RunningMesh) -> None:
    async with AsyncClient(mesh.address, tenant="acme") as client, asyncio.timeout(WAIT_S):
        stream = client.generate("hello", model="small", min_tokens=900, max_tokens=1000)
        await anext(stream)
        while not (workers := workers_of(await sample(client), "small")):
            pass
        (worker,) = workers
        while not rows_in(await client.metrics(*ROWS_OF_WORKER), "small", worker):
            pass
        drained = await client.drain_worker("small", worker)
        try:
            assert f"small {worker}" in drained.drained
            while not gauge(await sample(client), "sluice.worker.drained").get(("small", worker)):
                pass
            *_, finished = [event async for event in stream]
            assert isinstance(finished, Finished)
            assert finished.usage.completion_tokens >= 900
        finally:
            assert not (await client.drain_worker("small", worker, undo=True)).drained
        while not (await ready(client)):
            pass
        while not workers_of(seen := await sample(client), "small"):
            pass
        shown = lines("top", View(seen, None, None), 80, 24)
        assert any("small" in line and "live" in line for line in shown)


async def sample(client: AsyncClient) -> Sample:
    read = await client.metrics(*WANTED)
    return Sample.of(asyncio.get_running_loop().time(), read, await client.requests(limit=0))


def workers_of(found: Sample, model: str) -> list[str]:
    return [worker for name, worker in gauge(found, "sluice.worker.live") if name == model]


def gauge(found: Sample, metric: str) -> dict[tuple[str, ...], float]:
    return {labels: value[0] for labels, value in found.since(None, metric).items()}


async def ready(client: AsyncClient) -> bool:
    return all(model.ready for model in await client.list_models() if model.name == "small")
