"""Processes of jobs in a test's own loop, and a client of them."""

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import grpc
from opentelemetry.trace import NoOpTracer

from jobs.app import serve
from sluice.client.channel import error_of
from sluice.defaults import ALL_TENANTS_METADATA, TENANT_METADATA
from sluice.settings import IdentitySettings, JobsSettings, NatsSettings, Settings
from sluice.startup import child_environment, free_port, module_command
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.jobs_pb2_grpc import JobServiceStub
from tests.support.settings import tuned

BOUND_S: Final = 60.0
Metadata = tuple[tuple[str, str], ...]
EVERY: Final[Metadata] = ((TENANT_METADATA, "operator"), (ALL_TENANTS_METADATA, "1"))
"""Of a call that sees the jobs of all tenants."""


def of(tenant: str) -> Metadata:
    """Of a call of a tenant."""
    return ((TENANT_METADATA, tenant),)


class Process:
    """One process in the loop of the test."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(serve(settings, name, NoOpTracer(), self._stop))

    async def end(self) -> None:
        """As SIGTERM does."""
        self._stop.set()
        await self._task


class RealProcess:
    """A process of its own, to be killed."""

    def __init__(self, config: Path, name: str) -> None:
        command = (*module_command("jobs", config), "--id", name)
        self._process = subprocess.Popen(command, env=child_environment())

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    end = kill


class Processes:
    """Starts processes, and asks the last one that was started."""

    def __init__(self, nats_url: str, gateway: str, folder: Path) -> None:
        self._nats_url = nats_url
        self._gateway = gateway
        self._folder = folder
        self.identity = IdentitySettings()
        self._running: list[Process | RealProcess] = []
        self.channel: Any = None

    async def start(self, name: str = "jobs", **jobs: Any) -> Process:
        """A process that answers, with these settings of ``jobs``."""
        settings = self._settings(jobs).model_copy(update={"identity": self.identity})
        process = Process(settings, name)
        await self._use(process, settings)
        return process

    async def start_real(self, name: str, **jobs: Any) -> RealProcess:
        """A process that can be killed."""
        settings = self._settings(jobs)
        config = self._folder / f"{name}.yaml"
        config.write_text(settings.to_yaml())
        process = RealProcess(config, name)
        await self._use(process, settings)
        return process

    def _settings(self, jobs: dict[str, Any]) -> Settings:
        address = f"127.0.0.1:{free_port()}"
        return Settings(
            nats=NatsSettings(url=self._nats_url),
            jobs=tuned(JobsSettings, address=address, gateways=self._gateway, **jobs),
        )

    async def _use(self, process: Process | RealProcess, settings: Settings) -> None:
        self._running.append(process)
        if self.channel is not None:
            await self.channel.close()
        self.channel = grpc.aio.insecure_channel(settings.jobs.address)
        await asyncio.wait_for(self.channel.channel_ready(), BOUND_S)
        self.stub: Any = JobServiceStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.channel is not None:
            await self.channel.close()
        for process in self._running:
            await process.end()

    async def ask(self, method: str, request: Any, metadata: Metadata = ()) -> Any:
        """The response of a method, or its responses; raises its typed error.

        ``request`` may be a list of messages that are sent one after the other.
        """
        sent = iter(request) if isinstance(request, list) else request
        call = getattr(self.stub, method)(sent, metadata=metadata)
        try:
            if hasattr(call, "read"):
                return [response async for response in call]
            return await call
        except grpc.RpcError as failed:
            raise error_of(failed) from failed

    async def upload(self, data: bytes, name: str = "in.jsonl", metadata: Metadata = ()) -> str:
        pieces = [
            pb.UploadInputRequest(name=name, data=data[begin : begin + 100_000])
            for begin in range(0, len(data) or 1, 100_000)
        ]
        return str((await self.ask("UploadInput", pieces, metadata)).upload_id)

    async def create(
        self, data: bytes = b"", key: str = "", metadata: Metadata = (), **spec: Any
    ) -> pb.Job:
        """A job with the items of ``data``, or with the ``input`` of its specification."""
        if "input" not in spec:
            spec["input"] = pb.JobInput(upload_id=await self.upload(data, metadata=metadata))
        whole = pb.JobSpec(**{"model": "echo", **spec})
        request = pb.CreateJobRequest(spec=whole, idempotency_key=key)
        return (await self.ask("CreateJob", request, metadata)).job  # type: ignore[no-any-return]

    async def get(self, job: str) -> pb.Job:
        return (await self.ask("GetJob", pb.GetJobRequest(id=job), EVERY)).job  # type: ignore[no-any-return]

    async def when(self, job: str, holds: Callable[[pb.Job], bool]) -> pb.Job:
        """The job as soon as ``holds``."""
        async with asyncio.timeout(BOUND_S):
            while True:
                found = await self.get(job)
                if holds(found):
                    return found
                await asyncio.sleep(0.02)

    async def running(self, job: str) -> pb.Job:
        return await self.when(job, lambda one: one.state == pb.JOB_STATE_RUNNING)

    async def ended(self, job: str) -> pb.Job:
        """The job when it is over or paused."""
        states = (pb.JOB_STATE_QUEUED, pb.JOB_STATE_RUNNING)
        return await self.when(job, lambda one: one.state not in states)

    async def results(self, job: str, first: int = 0) -> list[pb.JobResult]:
        request = pb.GetResultsRequest(id=job, from_index=first)
        return [
            one for page in await self.ask("GetResults", request, EVERY) for one in page.results
        ]

    async def letters(self, job: str, first: int = 0) -> list[pb.JobResult]:
        request = pb.ListDeadLettersRequest(id=job, from_index=first)
        pages = await self.ask("ListDeadLetters", request, EVERY)
        return [one for page in pages for one in page.results]

    async def pause(self, job: str) -> pb.Job:
        return (await self.ask("PauseJob", pb.PauseJobRequest(id=job), EVERY)).job  # type: ignore[no-any-return]

    async def resume(self, job: str, **limits: Any) -> pb.Job:
        given = pb.JobLimits(**limits) if limits else None
        request = pb.ResumeJobRequest(id=job, limits=given)
        return (await self.ask("ResumeJob", request, EVERY)).job  # type: ignore[no-any-return]

    async def cancel(self, job: str) -> pb.Job:
        return (await self.ask("CancelJob", pb.CancelJobRequest(id=job), EVERY)).job  # type: ignore[no-any-return]

    async def delete(self, job: str) -> None:
        await self.ask("DeleteJob", pb.DeleteJobRequest(id=job), EVERY)

    async def retry(self, job: str, *reasons: str) -> int:
        """Run dead letters again; how many these are."""
        request = pb.RetryDeadLettersRequest(id=job, reasons=reasons)
        return (await self.ask("RetryDeadLetters", request)).items  # type: ignore[no-any-return]


def lines(count: int, prompt: Callable[[int], str] = lambda n: f"prompt {n}") -> bytes:
    """A file of so many items."""
    return b"".join(
        json.dumps({"id": f"i{n}", "prompt": prompt(n)}).encode() + b"\n" for n in range(count)
    )
