"""What a tenant may have of the places, the jobs and the store; deadlines of jobs that wait; damaged records."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import nats
import pytest

from sluice import errors
from sluice.client.channel import error_of
from sluice.defaults import TENANT_METADATA
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1 import jobs_pb2 as pb
from sluice.wire import subjects
from sluice.wire.clock import timestamp, unix_ms
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import BOUND_S, Processes, lines


def of(tenant: str) -> Any:
    return ((TENANT_METADATA, tenant),)


async def created(processes: Processes, tenant: str, data: bytes, **spec: Any) -> pb.Job:
    async def pieces() -> Any:
        yield pb.UploadInputRequest(name="in.jsonl", data=data)

    stub = processes.stub
    try:
        upload = await stub.UploadInput(pieces(), metadata=of(tenant))
        given = pb.JobInput(upload_id=upload.upload_id)
        request = pb.CreateJobRequest(spec=pb.JobSpec(model="echo", input=given, **spec))
        return (await stub.CreateJob(request, metadata=of(tenant))).job  # type: ignore[no-any-return]
    except grpc.RpcError as failed:
        raise error_of(failed) from failed


async def ended(processes: Processes, job: str, tenant: str) -> pb.Job:
    async with asyncio.timeout(BOUND_S):
        while True:
            found = await processes.stub.GetJob(pb.GetJobRequest(id=job), metadata=of(tenant))
            if found.job.state not in (pb.JOB_STATE_QUEUED, pb.JOB_STATE_RUNNING):
                return found.job  # type: ignore[no-any-return]
            await asyncio.sleep(0.02)


async def test_a_tenant_with_many_jobs_leaves_places_to_others(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.hold.clear()
    gateway.held = lambda prompt: not prompt.startswith("quick")
    await processes.start(running_max=4)
    slow = [await created(processes, "slow", lines(2)) for _ in range(6)]
    quick = await created(processes, "other", lines(3, lambda n: f"quick {n}"))
    done = await ended(processes, quick.id, "other")
    assert done.state == pb.JOB_STATE_COMPLETED
    states = [
        (await processes.stub.GetJob(pb.GetJobRequest(id=one.id), metadata=of("slow"))).job.state
        for one in slow
    ]
    assert states.count(pb.JOB_STATE_RUNNING) == 2
    gateway.hold.set()
    for one in slow:
        assert (await ended(processes, one.id, "slow")).state == pb.JOB_STATE_COMPLETED


async def test_a_tenant_without_a_place_gets_that_of_one_with_several(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.hold.clear()
    gateway.held = lambda prompt: not prompt.startswith("quick")
    await processes.start(running_max=4)
    slow = [
        await created(processes, tenant, lines(2)) for tenant in ("slow-1", "slow-2") for _ in "12"
    ]
    for one in slow:
        await processes_running(processes, one)
    quick = await created(processes, "other", lines(3, lambda n: f"quick {n}"))
    assert (await ended(processes, quick.id, "other")).state == pb.JOB_STATE_COMPLETED
    gateway.hold.set()
    for one in slow:
        job = await ended(processes, one.id, one.tenant)
        assert (job.state, job.progress.succeeded) == (pb.JOB_STATE_COMPLETED, 2)


async def test_a_tenant_starts_so_many_jobs_a_minute(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.scheduler.STARTS_PER_MINUTE", 0.001)
    await processes.start()
    first, second = [await created(processes, "acme", lines(1)) for _ in "12"]
    assert (await ended(processes, first.id, "acme")).state == pb.JOB_STATE_COMPLETED
    other = await created(processes, "other", lines(1))
    assert (await ended(processes, other.id, "other")).state == pb.JOB_STATE_COMPLETED
    waits = await processes.stub.GetJob(pb.GetJobRequest(id=second.id), metadata=of("acme"))
    assert waits.job.state == pb.JOB_STATE_QUEUED


async def processes_running(processes: Processes, job: pb.Job) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            found = await processes.stub.GetJob(
                pb.GetJobRequest(id=job.id), metadata=of(job.tenant)
            )
            if found.job.state == pb.JOB_STATE_RUNNING:
                return
            await asyncio.sleep(0.02)


async def test_a_tenant_has_so_many_jobs(processes: Processes) -> None:
    await processes.start(tenant_jobs_max=2)
    jobs = [await created(processes, "acme", lines(1)) for _ in "12"]
    for one in jobs:
        await ended(processes, one.id, "acme")
    with pytest.raises(errors.LimitReached, match=r"has 2 jobs; delete unused ones"):
        await created(processes, "acme", lines(1))
    await created(processes, "other", lines(1))
    await processes.stub.DeleteJob(pb.DeleteJobRequest(id=jobs[0].id), metadata=of("acme"))
    async with asyncio.timeout(BOUND_S):
        while True:  # the process hears of it
            try:
                await created(processes, "acme", lines(1))
                break
            except errors.LimitReached:
                await asyncio.sleep(0.02)


async def test_known_key_is_answered_at_the_tenants_job_limit(processes: Processes) -> None:
    await processes.start(tenant_jobs_max=1)
    given = pb.JobInput(upload_id=await processes.upload(lines(1)))
    request = pb.CreateJobRequest(
        spec=pb.JobSpec(model="echo", input=given), idempotency_key="nightly"
    )
    first, second = [(await processes.stub.CreateJob(request)).job for _ in "12"]
    assert first.id == second.id
    request.idempotency_key = "another"
    with pytest.raises(grpc.RpcError) as refused:
        await processes.stub.CreateJob(request)
    assert isinstance(error_of(refused.value), errors.LimitReached)


async def test_calls_at_the_same_time_are_counted(processes: Processes) -> None:
    await processes.start(tenant_jobs_max=3)
    given = pb.JobInput(upload_id=await processes.upload(lines(1)))
    request = pb.CreateJobRequest(spec=pb.JobSpec(model="echo", input=given))
    calls = [processes.stub.CreateJob(request) for _ in range(20)]
    made = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, pb.CreateJobResponse) for one in made) == 3


async def test_a_tenant_has_so_many_uploads(processes: Processes) -> None:
    await processes.start(tenant_jobs_max=1)
    for _ in "12":
        await processes.upload(lines(1))
    with pytest.raises(grpc.RpcError) as refused:
        await processes.upload(lines(1))
    error = error_of(refused.value)
    assert isinstance(error, errors.LimitReached)
    assert "2 uploads; delete unused ones" in error.message


async def test_an_input_at_a_url_is_counted_too(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(40_000))
    prefix = f"file://{tmp_path}"
    await processes.start(inputs_max_bytes=2 << 20, input_prefixes=[prefix])
    given = pb.JobInput(url=f"{prefix}/in.jsonl")
    request = pb.CreateJobRequest(spec=pb.JobSpec(model="echo", input=given))
    job = await processes.ended((await processes.stub.CreateJob(request)).job.id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "STORAGE_FULL")
    assert "the inputs of the tenant" in job.reason


async def test_a_specification_has_a_size(processes: Processes) -> None:
    await processes.start()
    with pytest.raises(errors.InvalidRequest, match="spec: has over 65536 bytes"):
        await created(processes, "acme", lines(1), labels={"a": "x" * 70_000})


async def test_a_tenant_fills_its_share_of_the_inputs_alone(processes: Processes) -> None:
    await processes.start(inputs_max_bytes=4 << 20)
    whole = b'{"prompt": "' + b"x" * 500_000 + b'"}\n'
    taken = []
    with contextlib.suppress(errors.StorageFull):
        for _ in range(9):
            taken.append(await created(processes, "acme", whole))
    assert len(taken) == 5, "2 MiB and what the last one has"
    with pytest.raises(errors.StorageFull, match="its share of the jobs store"):
        await created(processes, "acme", whole)
    assert (await created(processes, "other", lines(1))).id


async def test_results_of_a_tenant_pause_its_job_alone(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.answer = lambda prompt: prompt + "x" * 50_000
    await processes.start(results_max_bytes=8 << 20, window_items=4, tenant_share=0.1)
    job = await created(processes, "acme", lines(400))
    job = await ended(processes, job.id, "acme")
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "STORAGE_FULL")
    assert "of the tenant" in job.reason
    stored = [
        one
        async for page in processes.stub.GetResults(
            pb.GetResultsRequest(id=job.id), metadata=of("acme")
        )
        for one in page.results
    ]
    assert job.progress.succeeded == len(stored) > 0
    other = await created(processes, "other", lines(3))
    assert (await ended(processes, other.id, "other")).state == pb.JOB_STATE_COMPLETED


async def test_deadlines_in_the_past_are_refused(processes: Processes) -> None:
    await processes.start()
    late = pb.JobLimits(deadline_time=timestamp(unix_ms() - 5000))
    with pytest.raises(errors.InvalidRequest, match=r"deadline_time: has passed"):
        await created(processes, "acme", lines(1), limits=late)


async def test_a_job_that_waits_expires_at_its_deadline(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.hold.clear()
    await processes.start(running_max=1)
    first = await created(processes, "acme", lines(2))
    await processes_running(processes, first)
    soon = pb.JobLimits(deadline_time=timestamp(unix_ms() + 1500))
    queued = await created(processes, "acme", lines(1), limits=soon)
    done = await ended(processes, queued.id, "acme")
    assert (done.state, done.reason_code) == (pb.JOB_STATE_EXPIRED, "DEADLINE_EXCEEDED")
    limits = pb.JobLimits(deadline_time=timestamp(unix_ms() + 1500))
    gateway.hold.set()
    await ended(processes, first.id, "acme")
    gateway.hold.clear()
    paused = await created(processes, "acme", lines(5), limits=limits)
    await processes.stub.PauseJob(pb.PauseJobRequest(id=paused.id), metadata=of("acme"))
    async with asyncio.timeout(BOUND_S):
        while True:
            asked = pb.GetJobRequest(id=paused.id)
            found = (await processes.stub.GetJob(asked, metadata=of("acme"))).job
            if found.state == pb.JOB_STATE_EXPIRED:
                break
            await asyncio.sleep(0.02)
    gateway.hold.set()


async def test_a_damaged_record_is_left_out(
    processes: Processes, nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = await nats.connect(nats_url)
    await processes.start()
    prefix = subjects.bucket_prefix(subjects.JOBS_BUCKET)
    jetstream = client.jetstream()
    await jetstream.publish(f"{prefix}job-damaged", b"\xff\xff")
    await jetstream.publish(f"{prefix}upload.damaged", b"\xff\xff")
    other = JobRecord(job=pb.Job(id="job-of-another", state=pb.JOB_STATE_QUEUED))
    await jetstream.publish(f"{prefix}job-taken-for", other.SerializeToString())
    job = await created(processes, "acme", lines(2))
    assert (await ended(processes, job.id, "acme")).state == pb.JOB_STATE_COMPLETED
    listed = (await processes.stub.ListJobs(pb.ListJobsRequest(), metadata=of("acme"))).jobs
    assert [one.id for one in listed] == [job.id]
    assert "damaged record job-damaged" in caplog.text
    assert "damaged record job-taken-for" in caplog.text
    await client.close()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param("1234", id="others", marks=pytest.mark.long),
        pytest.param("1111", id="the-same-started-again"),
    ],
)
async def test_a_job_is_given_up_after_three_lost_processes(
    processes: Processes, gateway: GatewayDouble, names: str
) -> None:
    gateway.hold.clear()
    named = iter([f"process-{name}" for name in names])
    process = await processes.start_real(next(named))
    job = await created(processes, "acme", lines(2))
    await processes_running(processes, job)
    for _ in range(2):
        await process.kill()
        left = gateway.asked.total()
        process = await processes.start_real(next(named))
        async with asyncio.timeout(BOUND_S):
            while True:  # until it runs the job
                if gateway.asked.total() > left:
                    break
                await asyncio.sleep(0.02)
    await process.kill()
    await processes.start(next(named))
    done = await ended(processes, job.id, "acme")
    assert (done.state, done.reason_code) == (pb.JOB_STATE_FAILED, "PROCESSES_LOST")
    assert "3 jobs processes ended" in done.reason
    gateway.hold.set()
