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
from tests.jobs.processes import BOUND_S, Processes, lines

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


def upload_of(data: bytes) -> pb.UploadInputRequest:
    return pb.UploadInputRequest(name="in.jsonl", data=data)


async def error(call: Any) -> errors.SluiceError:
    with pytest.raises(grpc.RpcError) as failed:
        await (call.read() if hasattr(call, "read") else call)
    return error_of(failed.value)


def every_call(stub: Any, job: str, metadata: Any) -> list[Any]:
    """One call of each method that names a job."""
    return [
        stub.GetJob(pb.GetJobRequest(id=job), metadata=metadata),
        stub.WatchJob(pb.WatchJobRequest(id=job), metadata=metadata),
        stub.PauseJob(pb.PauseJobRequest(id=job), metadata=metadata),
        stub.ResumeJob(pb.ResumeJobRequest(id=job), metadata=metadata),
        stub.CancelJob(pb.CancelJobRequest(id=job), metadata=metadata),
        stub.DeleteJob(pb.DeleteJobRequest(id=job), metadata=metadata),
        stub.GetResults(pb.GetResultsRequest(id=job), metadata=metadata),
        stub.ListDeadLetters(pb.ListDeadLettersRequest(id=job), metadata=metadata),
        stub.RetryDeadLetters(pb.RetryDeadLettersRequest(id=job), metadata=metadata),
    ]


async def test_jobs_and_dead_letters_of_another_tenant_are_unknown(processes: Processes) -> None:
    await processes.start()
    job = await processes.create(lines(2) + b"no JSON\n", key="monthly")
    await processes.ended(job.id)
    stub, other = processes.stub, ((TENANT_METADATA, "other"),)

    for call in every_call(stub, job.id, other):
        assert isinstance(await error(call), errors.JobUnknown)
    assert not (await stub.ListJobs(pb.ListJobsRequest(), metadata=other)).jobs
    # The same key is a job of their own; its input must be theirs too.
    spec = pb.JobSpec(model="echo", input=job.spec.input)
    theirs = pb.CreateJobRequest(spec=spec, idempotency_key="monthly")
    refused = await error(stub.CreateJob(theirs, metadata=other))
    assert isinstance(refused, errors.UploadUnknown)
    upload = pb.DeleteUploadRequest(upload_id=job.spec.input.upload_id)
    foreign = await error(stub.DeleteUpload(upload, metadata=other))
    unknown = await error(stub.DeleteUpload(pb.DeleteUploadRequest(upload_id="upload-none")))
    assert isinstance(foreign, errors.UploadUnknown)
    assert foreign.message == unknown.message.replace("upload-none", upload.upload_id)
    assert not (await stub.ListUploads(pb.ListUploadsRequest(), metadata=other)).uploads
    (kept,) = (await stub.ListUploads(pb.ListUploadsRequest())).uploads
    assert kept.upload_id == upload.upload_id
    assert (await stub.GetJob(pb.GetJobRequest(id=job.id))).job.id == job.id


async def test_answers_of_another_tenants_jobs_are_not_taken(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    theirs = await processes.create(lines(3))
    await processes.ended(theirs.id)
    stub, other = processes.stub, ((TENANT_METADATA, "other"),)
    upload = (await stub.UploadInput(iter([upload_of(lines(3))]), metadata=other)).upload_id
    for named in (theirs.id, "job-none"):  # whether there is one is not told
        dedupe = pb.JobDedupe(reuse_job_ids=[named])
        spec = pb.JobSpec(model="echo", input=pb.JobInput(upload_id=upload), dedupe=dedupe)
        refused = await error(stub.CreateJob(pb.CreateJobRequest(spec=spec), metadata=other))
        assert isinstance(refused, errors.JobUnknown)
        assert refused.message == f"no job {named!r}"
    assert set(gateway.asked.values()) == {1}


async def test_only_gateways_are_answered_and_name_the_tenant(processes: Processes) -> None:
    processes.identity = IdentitySettings(api_keys=True, mesh_key=MESH_KEY)
    await processes.start()
    stub = processes.stub
    for metadata in ((), ((TENANT_METADATA, "acme"),), *STOLEN):
        for call in every_call(stub, "job-1", metadata):
            assert isinstance(await error(call), errors.PermissionDenied)

    assert not (await stub.ListJobs(pb.ListJobsRequest(), metadata=EVERY)).jobs
    unknown = await error(stub.GetJob(pb.GetJobRequest(id="job-1"), metadata=OTHER))
    assert isinstance(unknown, errors.JobUnknown)


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
    compressed = stub.Check(
        HealthCheckRequest(service="x" * 4096), compression=grpc.Compression.Gzip
    )
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        await compressed
    assert isinstance(
        await error(channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff")),
        errors.InvalidRequest,
    )
    monkeypatch.setattr("jobs.app.HEALTH_S", 0.05)
    silent = channel.stream_stream("/grpc.health.v1.Health/Check")()
    assert isinstance(await error(silent.read()), errors.DeadlinePassed)


async def test_an_operator_sees_and_ends_the_jobs_of_all(processes: Processes) -> None:
    await processes.start()
    job = await processes.create(lines(1))
    await processes.ended(job.id)
    stub = processes.stub
    (seen,) = (await stub.ListJobs(pb.ListJobsRequest(), metadata=EVERY)).jobs
    assert (seen.id, seen.tenant) == (job.id, "default")
    await stub.DeleteJob(pb.DeleteJobRequest(id=job.id), metadata=EVERY)


async def test_job_of_another_tenant_cannot_be_reused(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await processes.create(lines(2))
    await processes.ended(job.id)
    other = ((TENANT_METADATA, "other"),)

    async def refused(reused: str) -> str:
        given = pb.JobInput(url="file:///none")
        spec = pb.JobSpec(model="echo", input=given, dedupe=pb.JobDedupe(reuse_job_ids=[reused]))
        found = await error(
            processes.stub.CreateJob(pb.CreateJobRequest(spec=spec), metadata=other)
        )
        assert isinstance(found, errors.JobUnknown)
        return found.message.replace(reused, "JOB")

    assert await refused(job.id) == await refused("job-0")


async def test_a_job_that_was_deleted_since_has_no_answers_to_reuse(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.hold.clear()
    gateway.held = lambda prompt: prompt.startswith("long")
    await processes.start(running_max=1)
    earlier = await processes.create(lines(2))
    await processes.ended(earlier.id)
    await processes.create(lines(1, lambda _: "long"))
    job = await processes.create(lines(2), dedupe=pb.JobDedupe(reuse_job_ids=[earlier.id]))
    await processes.stub.DeleteJob(pb.DeleteJobRequest(id=earlier.id))
    gateway.hold.set()

    job = await processes.ended(job.id)
    assert (job.state, job.report.progress.deduplicated) == (pb.JOB_STATE_COMPLETED, 0)


async def test_waiting_calls_of_a_tenant_do_not_block_others(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await processes.start()
    job = await processes.create(lines(1))
    await processes.ended(job.id)
    read, gate, reading = JobStore.read, asyncio.Event(), Counter[str]()

    async def slow(self: JobStore, name: str) -> Any:
        reading[name] += 1
        if name == "job-slow":
            await gate.wait()
        return await read(self, name)

    monkeypatch.setattr(JobStore, "read", slow)
    other = ((TENANT_METADATA, "other"),)
    request = pb.GetJobRequest(id="job-slow")
    calls = [processes.stub.GetJob(request, metadata=other) for _ in range(50)]
    try:
        async with asyncio.timeout(BOUND_S):
            while True:
                if reading["job-slow"] == READS_OF_TENANT:
                    break
                await asyncio.sleep(0.01)
            for _ in range(20):
                await processes.stub.GetJob(pb.GetJobRequest(id=job.id))
        assert reading["job-slow"] == READS_OF_TENANT
    finally:
        gate.set()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_items_name_the_key_that_made_or_resumed_their_job(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.plan = lambda _prompt, _tries: errors.Unauthenticated.of("KEY_REVOKED", "revoked")
    upload = (await processes.stub.UploadInput(iter([upload_of(lines(2))]))).upload_id
    spec = pb.JobSpec(model="echo", input=pb.JobInput(upload_id=upload))
    first, second = ((KEY_METADATA, "first"),), ((KEY_METADATA, "second"),)
    made = await processes.stub.CreateJob(pb.CreateJobRequest(spec=spec), metadata=first)
    paused = await processes.when(
        made.job.id, lambda job: job.state == pb.JOB_STATE_PAUSED and not job.runner
    )
    assert paused.reason == "revoked; then resume the job with it"
    assert gateway.keys == {"first"}
    gateway.plan = lambda _prompt, _tries: None
    await processes.stub.ResumeJob(pb.ResumeJobRequest(id=made.job.id), metadata=second)
    ended = await processes.ended(made.job.id)
    assert (ended.progress.succeeded, gateway.keys) == (2, {"first", "second"})


def test_key_of_a_job_is_signed() -> None:
    metadata = {TENANT_METADATA: "acme", KEY_METADATA: "a"}
    given = dict(signed(metadata, MESH_KEY))
    assert is_signed(given, MESH_KEY)
    assert not is_signed({**given, KEY_METADATA: "b"}, MESH_KEY)
    assert not is_signed({k: v for k, v in given.items() if k != KEY_METADATA}, MESH_KEY)
