"""Jobs and uploads by their API: of one tenant, once for a key, deleted with all that is theirs alone."""

import hashlib
from typing import Any

import grpc
import pytest

from jobs.service import new_job_id
from sluice import errors
from sluice.client.channel import error_of
from sluice.defaults import ALL_TENANTS_METADATA, TENANT_METADATA
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import timestamp, unix_ms
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes, lines

Metadata = tuple[tuple[str, str], ...]
ACME: Metadata = ((TENANT_METADATA, "acme"),)
OTHER: Metadata = ((TENANT_METADATA, "other"),)
EVERY: Metadata = (*OTHER, (ALL_TENANTS_METADATA, "1"))


async def upload_of(stub: Any, data: bytes, metadata: Metadata = ACME, name: str = "") -> str:
    request = pb.UploadInputRequest(name=name, data=data)
    return str((await stub.UploadInput(iter([request]), metadata=metadata)).upload_id)


def request_of(upload: str, key: str = "", **spec: Any) -> pb.CreateJobRequest:
    given = pb.JobInput(upload_id=upload)
    return pb.CreateJobRequest(
        spec=pb.JobSpec(model="echo", input=given, **spec), idempotency_key=key
    )


async def create(stub: Any, upload: str, metadata: Metadata = ACME, key: str = "") -> pb.Job:
    return (await stub.CreateJob(request_of(upload, key), metadata=metadata)).job  # type: ignore[no-any-return]


async def ended(stub: Any, job: pb.Job, metadata: Metadata = ACME) -> pb.Job:
    async for seen in stub.WatchJob(pb.WatchJobRequest(id=job.id), metadata=metadata):
        job = seen.job
    return job


async def refused(call: Any) -> errors.SluiceError:
    with pytest.raises(grpc.RpcError) as failed:
        await call
    return error_of(failed.value)


async def ids(stub: Any, metadata: Metadata, **asked: Any) -> set[str]:
    found = await stub.ListJobs(pb.ListJobsRequest(**asked), metadata=metadata)
    return {one.id for one in found.jobs}


async def test_bytes_that_are_no_message_are_refused(processes: Processes) -> None:
    await processes.start()
    channel, of = processes.channel, "/sluice.v1.JobService/"
    told = await refused(channel.unary_unary(of + "GetJob")(b"\xff", metadata=ACME))
    watched = await refused(channel.unary_stream(of + "WatchJob")(b"\xff", metadata=ACME).read())
    assert [type(told), type(watched)] == [errors.InvalidRequest] * 2


async def test_the_same_key_of_a_tenant_is_the_same_job(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    stub, before = processes.stub, unix_ms()
    upload = await upload_of(stub, lines(1))
    job = await create(stub, upload, key="k" * 128)
    assert (job.tenant, job.id) == ("acme", new_job_id("acme", "k" * 128))
    assert before <= job.create_time.ToMilliseconds() <= unix_ms()
    # A file that is sent again, and a deadline that counts from now, are the same specification.
    again = request_of(await upload_of(stub, lines(1)), "k" * 128)
    again.spec.limits.deadline_time.CopyFrom(timestamp(unix_ms() + 10**7))
    assert (await stub.CreateJob(again, metadata=ACME)).job.id == job.id
    others = await upload_of(stub, lines(2))
    for changed in (request_of(others, "k" * 128), request_of(upload, "k" * 128, name="another")):
        error = await refused(stub.CreateJob(changed, metadata=ACME))
        assert isinstance(error, errors.IdempotencyConflict)
    error = await refused(stub.CreateJob(request_of(upload, "k" * 129), metadata=ACME))
    assert isinstance(error, errors.InvalidRequest)
    assert [one.field for one in error.violations] == ["idempotency_key"]
    # Without a key each is a job of its own; another tenant's key is another's.
    found = {(await create(stub, upload)).id for _ in range(2)}
    theirs = await create(stub, await upload_of(stub, lines(1), OTHER), OTHER, key="k" * 128)
    assert len({job.id, theirs.id, *found}) == 4
    assert theirs.tenant == "other"


def test_ids_of_jobs() -> None:
    for key in ("a", "b/c"):
        digest = hashlib.sha256(f"acme/{key}".encode()).hexdigest()
        assert new_job_id("acme", key) == f"job-{digest[:20]}"
    drawn = {new_job_id("acme", "") for _ in range(100)}
    assert len(drawn) == 100
    assert {len(one) for one in drawn} == {len("job-") + 20}


async def test_what_is_wrong_with_a_specification_is_named(processes: Processes) -> None:
    await processes.start()
    stub, upload = processes.stub, await upload_of(processes.stub, lines(1))

    async def wrong(request: pb.CreateJobRequest) -> list[str]:
        try:
            await stub.CreateJob(request, metadata=ACME)
        except grpc.RpcError as failed:
            return [one.field for one in error_of(failed).violations]
        return []

    large = request_of(upload)
    large.spec.sampling.regex = "a" * 65_000
    large.spec.sampling.regex += "a" * (64 * 1024 - large.spec.ByteSize())
    assert large.spec.ByteSize() == 64 * 1024
    assert "spec" not in await wrong(large)
    large.spec.sampling.regex += "a"
    assert await wrong(large) == ["spec"]

    late = request_of(upload, "key")
    late.spec.limits.deadline_time.CopyFrom(timestamp(unix_ms() - 1))
    assert await wrong(late) == ["limits.deadline_time"]
    job = await create(stub, upload, key="key")
    # What was created with the key before is there, late or not.
    assert (await stub.CreateJob(late, metadata=ACME)).job.id == job.id

    states = [pb.JOB_STATE_PAUSED] * (len(pb.JobState.values()) + 1)
    for asked, fields in ((states, ["states"]), (states[1:], None)):
        call = stub.ListJobs(pb.ListJobsRequest(states=asked), metadata=ACME)
        if fields is None:
            assert not (await call).jobs
        else:
            error = await refused(call)
            assert [one.field for one in error.violations] == fields


async def test_page_has_jobs_of_the_tenant_in_requested_states(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    stub = processes.stub
    upload, theirs = await upload_of(stub, lines(1)), await upload_of(stub, lines(1), OTHER)
    old = await create(stub, upload)
    await ended(stub, old)
    gateway.hold.clear()
    new = await create(stub, upload)
    newest = await create(stub, theirs, OTHER)
    first = await stub.ListJobs(pb.ListJobsRequest(page_size=1), metadata=ACME)
    assert [one.id for one in first.jobs] == [new.id]
    rest = pb.ListJobsRequest(page_size=1, page_token=first.next_page_token)
    assert [one.id for one in (await stub.ListJobs(rest, metadata=ACME)).jobs] == [old.id]
    over = pb.ListJobsRequest(page_size=1, states=[pb.JOB_STATE_COMPLETED])
    assert [one.id for one in (await stub.ListJobs(over, metadata=ACME)).jobs] == [old.id]
    every = await stub.ListJobs(pb.ListJobsRequest(page_size=1), metadata=EVERY)
    assert [one.id for one in every.jobs] == [newest.id]


async def test_a_page_has_whole_uploads_of_the_tenant(processes: Processes) -> None:
    await processes.start()
    stub = processes.stub
    mine = [await upload_of(stub, lines(1)) for _ in range(2)]
    theirs = await upload_of(stub, lines(1), OTHER)

    async def page(token: str, metadata: Metadata = ACME) -> tuple[list[str], str]:
        asked = pb.ListUploadsRequest(page_size=1, page_token=token)
        found = await stub.ListUploads(asked, metadata=metadata)
        return [one.upload_id for one in found.uploads], found.next_page_token

    first, token = await page("")
    second, end = await page(token)
    assert {*first, *second} == set(mine)
    assert end == ""
    assert (await page("", OTHER)) == ([theirs], "")


async def test_labels_in_another_order_are_the_same_specification(processes: Processes) -> None:
    await processes.start()
    upload = await upload_of(processes.stub, lines(1))
    names = [f"label-{number}" for number in range(32)]
    for order in (names, names[::-1]):
        request = request_of(upload, "key")
        for name in order:
            request.spec.labels[name] = "x"
        job = (await processes.stub.CreateJob(request, metadata=ACME)).job
        assert job.id == new_job_id("acme", "key")


async def test_each_tenant_lists_its_own_jobs_and_uploads(processes: Processes) -> None:
    await processes.start()
    stub = processes.stub
    mine, theirs = (
        await upload_of(stub, lines(1)),
        await upload_of(stub, lines(2), OTHER, "x.jsonl"),
    )
    own, other = await create(stub, mine), await create(stub, theirs, OTHER)
    await ended(stub, own)
    await ended(stub, other, OTHER)
    assert await ids(stub, ACME) == {own.id}
    assert await ids(stub, OTHER) == {other.id}
    assert await ids(stub, EVERY) == {own.id, other.id}
    assert await ids(stub, ACME, states=[pb.JOB_STATE_COMPLETED]) == {own.id}
    assert await ids(stub, ACME, states=[pb.JOB_STATE_PAUSED]) == set()
    for metadata, uploads in ((ACME, {mine}), (OTHER, {theirs}), (EVERY, {mine, theirs})):
        listed = await stub.ListUploads(pb.ListUploadsRequest(), metadata=metadata)
        assert {one.upload_id for one in listed.uploads} == uploads
    asked = pb.GetUploadRequest(upload_id=theirs)
    assert isinstance(await refused(stub.GetUpload(asked, metadata=ACME)), errors.UploadUnknown)
    for metadata in (OTHER, EVERY):
        found = await stub.GetUpload(asked, metadata=metadata)
        assert (found.name, found.size_bytes) == ("x.jsonl", len(lines(2)))
        assert found.sha256 == hashlib.sha256(lines(2)).digest()
        assert found.create_time.seconds > 0
    (shown,) = (await stub.ListUploads(pb.ListUploadsRequest(), metadata=OTHER)).uploads
    assert (shown.name, shown.size_bytes, shown.create_time) == (
        *("x.jsonl", len(lines(2))),
        found.create_time,
    )


async def test_an_upload_that_is_not_complete_is_nobodys(processes: Processes) -> None:
    await processes.start()
    stub = processes.stub
    done = await upload_of(stub, lines(1))
    for unknown in ("upload-x", "", "*"):
        error = await refused(
            stub.GetUpload(pb.GetUploadRequest(upload_id=unknown), metadata=EVERY)
        )
        assert isinstance(error, errors.UploadUnknown)
    error = await refused(stub.CreateJob(request_of("upload-x"), metadata=ACME))
    assert isinstance(error, errors.UploadUnknown)
    error = await refused(stub.CreateJob(request_of(done), metadata=OTHER))
    assert isinstance(error, errors.UploadUnknown)


async def test_ended_job_is_deleted_with_its_last_used_upload(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    stub = processes.stub
    upload, elsewhere = await upload_of(stub, lines(1)), await upload_of(stub, lines(2))
    first, second, third = [await create(stub, one) for one in (upload, upload, elsewhere)]
    for job in (first, second, third):
        await ended(stub, job)
    gateway.hold.clear()
    running = await create(stub, elsewhere)
    error = await refused(stub.DeleteJob(pb.DeleteJobRequest(id=running.id), metadata=ACME))
    assert isinstance(error, errors.WrongJobState)
    assert "cancel it first" in error.message
    error = await refused(
        stub.DeleteUpload(pb.DeleteUploadRequest(upload_id=elsewhere), metadata=ACME)
    )
    assert isinstance(error, errors.WrongJobState)
    await stub.CancelJob(pb.CancelJobRequest(id=running.id), metadata=ACME)
    gateway.hold.set()

    async def uploads() -> set[str]:
        listed = await stub.ListUploads(pb.ListUploadsRequest(), metadata=ACME)
        return {one.upload_id for one in listed.uploads}

    for job, left in ((first, {upload, elsewhere}), (second, {elsewhere})):
        await stub.DeleteJob(pb.DeleteJobRequest(id=job.id), metadata=ACME)
        assert await uploads() == left
        error = await refused(stub.GetJob(pb.GetJobRequest(id=job.id), metadata=ACME))
        assert isinstance(error, errors.JobUnknown)
    assert await ids(stub, ACME) == {third.id, running.id}
    # An upload goes when no job reads it any more.
    await ended(stub, running)
    await stub.DeleteUpload(pb.DeleteUploadRequest(upload_id=elsewhere), metadata=ACME)
    assert await uploads() == set()
    asked = pb.GetUploadRequest(upload_id=elsewhere)
    assert isinstance(await refused(stub.GetUpload(asked, metadata=ACME)), errors.UploadUnknown)


@pytest.mark.parametrize("tenant", ["a.b", "*", ">", "x" * 65, ""])
async def test_what_is_no_tenant_has_no_jobs(processes: Processes, tenant: str) -> None:
    await processes.start()
    metadata = ((TENANT_METADATA, tenant),)
    error = await refused(processes.stub.ListJobs(pb.ListJobsRequest(), metadata=metadata))
    assert isinstance(error, errors.InvalidRequest)
    assert [one.field for one in error.violations] == [TENANT_METADATA]


async def test_a_change_of_another_tenants_job_changes_nothing(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    stub = processes.stub
    gateway.hold.clear()
    job = await create(stub, await upload_of(stub, lines(1)))
    for call in (
        stub.PauseJob(pb.PauseJobRequest(id=job.id), metadata=OTHER),
        stub.CancelJob(pb.CancelJobRequest(id=job.id), metadata=OTHER),
        stub.ResumeJob(
            pb.ResumeJobRequest(id=job.id, limits=pb.JobLimits(max_cost=1)), metadata=OTHER
        ),
    ):
        assert isinstance(await refused(call), errors.JobUnknown)
    found = (await stub.GetJob(pb.GetJobRequest(id=job.id), metadata=ACME)).job
    assert found.state in (pb.JOB_STATE_QUEUED, pb.JOB_STATE_RUNNING)
    assert not found.spec.HasField("limits")
    paused = (await stub.PauseJob(pb.PauseJobRequest(id=job.id), metadata=EVERY)).job
    assert paused.state == pb.JOB_STATE_PAUSED
