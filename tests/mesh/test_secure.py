"""A mesh with certificates: everything works with the permissions that each process has, and nothing without them."""

import asyncio
import json
from pathlib import Path
from typing import Final

import pytest

from bench.support.meshes import echo
from sluice.client import AsyncClient, ConnectionLost, Delta, PriorityName, RetryPolicy
from sluice.client.request import PRIORITIES
from sluice.settings import GatewaySettings, JobsSettings, TlsSettings
from sluice.v1 import jobs_pb2
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import kill, quick_settings

pytestmark = [pytest.mark.mesh, pytest.mark.long]

BOUND_S: Final = 90.0
TOKENS: Final = 60
PROMPT: Final = "one two three four five six seven eight nine ten " * 8
SETTINGS: Final = quick_settings(
    echo(64, echo_step_ms=50),
    gateway=GatewaySettings(address="127.0.0.1:0", drain_s=1, replicas=2),
    jobs=JobsSettings(),
    tls=TlsSettings(embedded=True),
)


def client_of(mesh: Mesh) -> AsyncClient:
    return AsyncClient(mesh.address, ca=str(mesh.ca))


async def ask(client: AsyncClient, priority: PriorityName, begun: asyncio.Event) -> str:
    text = ""
    limits = {"max_tokens": TOKENS, "min_tokens": TOKENS}
    async with client.generate(PROMPT, priority=priority, timeout_s=BOUND_S, **limits) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                text += event.text
                begun.set()
    return text


async def ask_all(client: AsyncClient, killed: str, mesh: Mesh) -> set[str]:
    """The texts of a call of each class while a process is killed."""
    begun = [asyncio.Event() for _ in PRIORITIES]
    asking = [
        asyncio.ensure_future(ask(client, priority, event))
        for priority, event in zip(PRIORITIES, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    if killed:
        kill(mesh, killed)
    return set(await asyncio.gather(*asking))


async def run_job(client: AsyncClient) -> list[str]:
    items = [json.dumps({"id": f"i{n}", "prompt": f"item {n}"}) for n in range(20)]
    upload = await client.jobs.upload("in.jsonl", lambda: ["\n".join(items).encode()])
    spec = jobs_pb2.JobSpec(model="echo", input=jobs_pb2.JobInput(upload_id=upload))
    job = await client.jobs.create(spec, "")
    async for seen in client.jobs.watch(job.id):
        job = seen
    return [result.custom_id async for result in client.jobs.results(job.id)]


async def test_a_secured_mesh_answers_recovers_and_runs_jobs(tmp_path: Path) -> None:
    async with running_mesh(SETTINGS, tmp_path) as mesh, client_of(mesh) as client:
        calm = await ask_all(client, "", mesh)
        assert len(calm) == 1
        for killed in ("batcher", "gateway", "triton-echo"):
            assert await ask_all(client, killed, mesh) == calm
        assert len(await run_job(client)) == 20
        async with AsyncClient(mesh.address, RetryPolicy(start_tries=1)) as stranger:
            with pytest.raises(ConnectionLost):
                await stranger.list_models()
    logs = "".join(file.read_text() for file in (tmp_path / "logs").glob("*.log"))
    assert "permissions violation" not in logs.lower()
