"""A job through a whole mesh, as a client of its gateway sees it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from bench.support.meshes import echo
from sluice.client.channel import open_aio
from sluice.settings import JobsSettings
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.jobs_pb2_grpc import JobServiceStub
from supervisor.control import reload_mesh
from supervisor.mesh import running_mesh
from tests.support.mesh import kill, quick_settings

pytestmark = pytest.mark.mesh

ITEMS: Final = 2000
BOUND_S: Final = 150.0


async def upload(items: int) -> AsyncIterator[pb.UploadInputRequest]:
    lines = [
        json.dumps({"id": f"i{n}", "prompt": f"item {n}", "max_tokens": 8}) for n in range(items)
    ]
    yield pb.UploadInputRequest(name="in.jsonl", data="\n".join(lines).encode())


async def create(stub: Any, items: int = ITEMS) -> str:
    upload_id = (await stub.UploadInput(upload(items))).upload_id
    spec = pb.JobSpec(model="echo", input=pb.JobInput(upload_id=upload_id))
    return str((await stub.CreateJob(pb.CreateJobRequest(spec=spec))).job.id)


async def when(stub: Any, job: str, *, least: int) -> pb.Job:
    """The job when so many items have an answer; a process that is being started is waited for."""
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(grpc.aio.AioRpcError):
                found: pb.Job = (await stub.GetJob(pb.GetJobRequest(id=job))).job
                if found.progress.succeeded >= least:
                    return found
            await asyncio.sleep(0.1)


async def results(stub: Any, job: str) -> list[tuple[str, str]]:
    pages = stub.GetResults(pb.GetResultsRequest(id=job))
    return [(one.custom_id, one.answer.text) async for page in pages for one in page.results]


@pytest.mark.long
async def test_a_job_whose_process_is_killed_is_that_of_a_calm_run() -> None:
    async with (
        running_mesh(quick_settings(echo(64), jobs=JobsSettings())) as mesh,
        open_aio(mesh.address) as channel,
    ):
        stub: Any = JobServiceStub(channel)
        calm = await create(stub)
        await when(stub, calm, least=ITEMS)
        killed = await create(stub)
        for least in (200, 900):
            await when(stub, killed, least=least)
            kill(mesh, "jobs")

        job = await when(stub, killed, least=ITEMS)

        assert await results(stub, killed) == await results(stub, calm)
        assert len(set(await results(stub, killed))) == ITEMS
        assert (job.progress.succeeded, job.progress.dead) == (ITEMS, 0)


@pytest.mark.long
async def test_a_job_whose_model_a_reload_removes_waits_for_it(tmp_path: Path) -> None:
    other, slow = echo(64, name="other"), echo(2, echo_step_ms=20.0)
    few = JobsSettings(window_items=4)  # requests that have begun keep their model
    both = quick_settings(other, slow, jobs=few)
    files = {"both": both, "without": both.model_copy(update={"models": (other,)})}
    for name, asked in files.items():
        (tmp_path / name).write_text(asked.to_yaml())
    async with running_mesh(both) as mesh, open_aio(mesh.address) as channel:
        stub: Any = JobServiceStub(channel)
        job = await create(stub, items=60)
        await when(stub, job, least=5)

        await asyncio.to_thread(reload_mesh, mesh.state_dir, tmp_path / "without")
        async for change in stub.WatchJob(pb.WatchJobRequest(id=job, until_paused=True)):
            paused = change.job
        assert (paused.state, paused.reason_code) == (pb.JOB_STATE_PAUSED, "MODEL_UNKNOWN")
        assert "model echo is no longer served" in paused.reason
        assert paused.progress.dead == 0

        await asyncio.to_thread(reload_mesh, mesh.state_dir, tmp_path / "both")
        await stub.ResumeJob(pb.ResumeJobRequest(id=job))
        done = await when(stub, job, least=60)
        assert done.progress.dead == 0
        assert len(set(await results(stub, job))) == 60
