"""Whose jobs a call may see: what the gateway says, and nobody else."""

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from jobs.service import READS_OF_TENANT
from jobs.store import JobStore
from sluice import errors
from sluice.client.channel import bearer_metadata, error_of
from sluice.defaults import ALL_TENANTS_METADATA, KEY_METADATA, TENANT_METADATA
from sluice.settings import IdentitySettings
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.job_calls import SIGNATURE, is_signed, signed
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import BOUND_S, Metadata, Processes, lines, of

MESH_KEY = "0123456789abcdef"
OTHER = signed({TENANT_METADATA: "other"}, MESH_KEY)
EVERY = signed({TENANT_METADATA: "other", ALL_TENANTS_METADATA: "1"}, MESH_KEY)
STOLEN = (
    bearer_metadata(MESH_KEY),
    (*bearer_metadata("x" * 20),),
    ((TENANT_METADATA, "acme"), (SIGNATURE, dict(OTHER)[SIGNATURE])),
    (*OTHER, (ALL_TENANTS_METADATA, "1")),
    signed({TENANT_METADATA: "other"}, MESH_KEY + "x"),
)
"""A signature is good for what it was made for."""
CALLS = {
    "GetJob": pb.GetJobRequest,
    "WatchJob": pb.WatchJobRequest,
    "PauseJob": pb.PauseJobRequest,
    "ResumeJob": pb.ResumeJobRequest,
    "CancelJob": pb.CancelJobRequest,
    "DeleteJob": pb.DeleteJobRequest,
    "GetResults": pb.GetResultsRequest,
    "ListDeadLetters": pb.ListDeadLettersRequest,
    "RetryDeadLetters": pb.RetryDeadLettersRequest,
}
"""The methods that name a job."""


async def check_refused(
    processes: Processes, error: type[Exception], method: str, request: Any, metadata: Metadata
) -> str:
    with pytest.raises(error) as refused:
        await processes.ask(method, request, metadata)
    return str(refused.value)


async def test_jobs_and_dead_letters_of_another_tenant_are_unknown(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await processes.create(lines(20) + b"no JSON\n", key="monthly")
    job = await processes.ended(job.id)
    other, unknown = of("other"), errors.UploadUnknown

    for method, request in CALLS.items():
        await check_refused(processes, errors.JobUnknown, method, request(id=job.id), other)
    assert not (await processes.ask("ListJobs", pb.ListJobsRequest(), other)).jobs
    # The same key is a job of their own; its input must be theirs too.
    spec = pb.JobSpec(model="echo", input=job.spec.input)
    theirs = pb.CreateJobRequest(spec=spec, idempotency_key="monthly")
    await check_refused(processes, unknown, "CreateJob", theirs, other)
    upload = job.spec.input.upload_id
    told = [
        await check_refused(
            processes, unknown, "DeleteUpload", pb.DeleteUploadRequest(upload_id=one), other
        )
        for one in (upload, "upload-none")
    ]
    assert told[0] == told[1].replace("upload-none", upload), "whether there is one is not told"
    assert not (await processes.ask("ListUploads", pb.ListUploadsRequest(), other)).uploads
    (kept,) = (await processes.ask("ListUploads", pb.ListUploadsRequest())).uploads
    assert kept.upload_id == upload
    assert await processes.get(job.id) == job
    # Nor are answers taken from it.
    given = pb.JobInput(upload_id=await processes.upload(lines(2), metadata=other))
    for named in (job.id, "job-none"):
        dedupe = pb.JobDedupe(reuse_job_ids=[named])
        with pytest.raises(errors.JobUnknown, match=f"no job {named!r}"):
            await processes.create(input=given, dedupe=dedupe, metadata=other)
    assert set(gateway.asked.values()) == {1}


async def test_only_gateways_are_answered_and_name_the_tenant(processes: Processes) -> None:
    processes.identity = IdentitySettings(api_keys=True, mesh_key=MESH_KEY)
    await processes.start()
    for metadata in ((), of("acme"), *STOLEN):
        for method, request in CALLS.items():
            denied = errors.PermissionDenied
            await check_refused(processes, denied, method, request(id="job-1"), metadata)

    assert not (await processes.ask("ListJobs", pb.ListJobsRequest(), EVERY)).jobs
    request = pb.GetJobRequest(id="job-1")
    await check_refused(processes, errors.JobUnknown, "GetJob", request, OTHER)


async def test_strangers_get_health_alone_in_time_and_uncompressed(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.identity = IdentitySettings(api_keys=True, mesh_key=MESH_KEY)
    await processes.start()
    channel = processes.channel
    stub = HealthStub(channel)
    assert (await stub.Check(HealthCheckRequest())).status == HealthCheckResponse.SERVING
    watcher = stub.Watch(HealthCheckRequest())
    assert (await watcher.read()).status == HealthCheckResponse.SERVING
    watcher.cancel()
    large = HealthCheckRequest(service="x" * 4096)
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        await stub.Check(large, compression=grpc.Compression.Gzip)
    check = "/grpc.health.v1.Health/Check"
    with pytest.raises(grpc.RpcError) as malformed:
        await channel.unary_unary(check)(b"\xff")
    assert isinstance(error_of(malformed.value), errors.InvalidRequest)
    monkeypatch.setattr("jobs.app.HEALTH_S", 0.05)
    with pytest.raises(grpc.RpcError) as silent:
        await channel.stream_stream(check)().read()
    assert isinstance(error_of(silent.value), errors.DeadlinePassed)


async def test_waiting_calls_of_a_tenant_do_not_block_others(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await processes.start()
    job = await processes.ended((await processes.create(lines(1))).id)
    read, gate, reading = JobStore.read, asyncio.Event(), Counter[str]()

    async def slow(self: JobStore, name: str) -> Any:
        reading[name] += 1
        if name == "job-slow":
            await gate.wait()
        return await read(self, name)

    monkeypatch.setattr(JobStore, "read", slow)
    request = pb.GetJobRequest(id="job-slow")
    calls = [processes.stub.GetJob(request, metadata=of("other")) for _ in range(50)]
    try:
        async with asyncio.timeout(BOUND_S):
            while True:
                if reading["job-slow"] == READS_OF_TENANT:
                    break
                await asyncio.sleep(0.01)
            for _ in range(20):
                await processes.get(job.id)
        assert reading["job-slow"] == READS_OF_TENANT
    finally:
        gate.set()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_items_name_the_key_that_made_or_resumed_their_job(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.plan = lambda _prompt, _tries: errors.Unauthenticated.of("KEY_REVOKED", "revoked")
    job = await processes.create(lines(2), metadata=((KEY_METADATA, "first"),))
    paused = await processes.when(
        job.id, lambda one: one.state == pb.JOB_STATE_PAUSED and not one.runner
    )
    assert paused.reason == "revoked; then resume the job with it"
    assert gateway.keys == {"first"}
    gateway.plan = lambda _prompt, _tries: None
    resume = pb.ResumeJobRequest(id=job.id)
    await processes.ask("ResumeJob", resume, ((KEY_METADATA, "second"),))
    ended = await processes.ended(job.id)
    assert (ended.progress.succeeded, gateway.keys) == (2, {"first", "second"})


def test_key_of_a_job_is_signed() -> None:
    metadata = {TENANT_METADATA: "acme", KEY_METADATA: "a"}
    given = dict(signed(metadata, MESH_KEY))
    assert is_signed(given, MESH_KEY)
    assert not is_signed({**given, KEY_METADATA: "b"}, MESH_KEY)
    assert not is_signed({k: v for k, v in given.items() if k != KEY_METADATA}, MESH_KEY)
