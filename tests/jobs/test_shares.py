"""What a tenant may have of the places, the jobs and the store; deadlines of jobs that wait; damaged records."""

import asyncio
import contextlib
from pathlib import Path

import nats
import pytest

from sluice import errors
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1 import jobs_pb2 as pb
from sluice.wire import subjects
from sluice.wire.clock import timestamp, unix_ms
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import BOUND_S, Processes, lines, of

ACME, OTHER = of("acme"), of("other")
COMPLETED = pb.JOB_STATE_COMPLETED


async def test_a_tenant_with_many_jobs_leaves_places_to_others(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.hold.clear()
    gateway.held = lambda prompt: not prompt.startswith("quick")
    await processes.start(running_max=4)
    slow = [await processes.create(lines(2), metadata=of("slow")) for _ in range(6)]
    quick = await processes.create(lines(3, lambda n: f"quick {n}"), metadata=OTHER)
    assert (await processes.ended(quick.id)).state == COMPLETED
    states = [(await processes.get(one.id)).state for one in slow]
    assert states.count(pb.JOB_STATE_RUNNING) == 2
    # Two have the other places: a third one gets that of one with several.
    third = [await processes.create(lines(2), metadata=of("third")) for _ in "12"]
    for job in third:
        await processes.running(job.id)
    quick = await processes.create(lines(3, lambda n: f"quick {n}"), metadata=OTHER)
    assert (await processes.ended(quick.id)).state == COMPLETED
    gateway.hold.set()
    for one in (*slow, *third):
        job = await processes.ended(one.id)
        assert (job.state, job.progress.succeeded) == (COMPLETED, 2)


async def test_a_tenant_starts_so_many_jobs_a_minute(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.scheduler.STARTS_PER_MINUTE", 0.001)
    await processes.start()
    first, second = [await processes.create(lines(1), metadata=ACME) for _ in "12"]
    other = await processes.create(lines(1), metadata=OTHER)
    for job in (first, other):
        assert (await processes.ended(job.id)).state == COMPLETED
    assert (await processes.get(second.id)).state == pb.JOB_STATE_QUEUED


async def test_a_tenant_has_so_many_jobs(processes: Processes) -> None:
    await processes.start(tenant_jobs_max=2)
    data = lines(1)
    jobs = [await processes.create(data, key, ACME) for key in "12"]
    for one in jobs:
        await processes.ended(one.id)
    with pytest.raises(errors.LimitReached, match=r"has 2 jobs; delete unused ones"):
        await processes.create(data, "3", ACME)
    assert (await processes.create(data, "1", ACME)).id == jobs[0].id, "it is known"
    await processes.create(data, metadata=OTHER)
    await processes.delete(jobs[0].id)
    async with asyncio.timeout(BOUND_S):
        while True:  # the process hears of it
            with contextlib.suppress(errors.LimitReached):
                await processes.create(data, metadata=ACME)
                break
            await asyncio.sleep(0.02)


async def test_calls_at_the_same_time_are_counted(processes: Processes) -> None:
    await processes.start(tenant_jobs_max=3)
    given = pb.JobInput(upload_id=await processes.upload(lines(1)))
    calls = [processes.create(input=given) for _ in range(20)]
    made = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, pb.Job) for one in made) == 3


async def test_a_tenant_has_so_many_uploads(processes: Processes) -> None:
    await processes.start(tenant_jobs_max=1)
    for _ in "12":
        await processes.upload(lines(1))
    with pytest.raises(errors.LimitReached, match="2 uploads; delete unused ones"):
        await processes.upload(lines(1))


async def test_a_process_counts_the_uploads_that_it_finds(processes: Processes) -> None:
    first = await processes.start("one", tenant_jobs_max=1)
    for _ in "12":
        await processes.upload(lines(1))
    await first.end()
    await processes.start("two", tenant_jobs_max=1)
    with pytest.raises(errors.LimitReached, match="2 uploads; delete unused ones"):
        await processes.upload(lines(1))


async def test_an_input_at_a_url_is_counted_too(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(40_000))
    prefix = f"file://{tmp_path}"
    await processes.start(inputs_max_bytes=2 << 20, input_prefixes=[prefix])
    job = await processes.create(input=pb.JobInput(url=f"{prefix}/in.jsonl"))
    job = await processes.ended(job.id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "STORAGE_FULL")
    assert "the inputs of the tenant" in job.reason


async def test_a_tenant_fills_its_share_of_the_inputs_alone(processes: Processes) -> None:
    await processes.start(inputs_max_bytes=4 << 20)
    whole = b'{"prompt": "' + b"x" * 500_000 + b'"}\n'
    taken = []
    with contextlib.suppress(errors.StorageFull):
        for _ in range(9):
            taken.append(await processes.create(whole, metadata=ACME))
    assert len(taken) == 5, "2 MiB and what the last one has"
    with pytest.raises(errors.StorageFull, match="its share of the jobs store"):
        await processes.create(whole, metadata=ACME)
    assert (await processes.create(lines(1), metadata=OTHER)).id


async def test_results_of_a_tenant_pause_its_job_alone(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.answer = lambda prompt: prompt + "x" * 50_000
    await processes.start(results_max_bytes=8 << 20, window_items=4, tenant_share=0.1)
    job = await processes.create(lines(400), metadata=ACME)
    job = await processes.ended(job.id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "STORAGE_FULL")
    assert "of the tenant" in job.reason
    assert job.progress.succeeded == len(await processes.results(job.id)) > 0
    other = await processes.create(lines(3), metadata=OTHER)
    assert (await processes.ended(other.id)).state == COMPLETED


async def test_a_job_that_waits_expires_at_its_deadline(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.hold.clear()
    await processes.start(running_max=1)
    first = await processes.create(lines(2))
    await processes.running(first.id)
    queued, paused = [
        await processes.create(lines(1), limits=pb.JobLimits(deadline_time=timestamp(at)))
        for at in [unix_ms() + 1500] * 2
    ]
    await processes.pause(paused.id)
    expired = pb.JOB_STATE_EXPIRED
    for job in (queued, paused):
        done = await processes.when(job.id, lambda one: one.state == expired)
        assert done.reason_code == "DEADLINE_EXCEEDED"
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
    job = await processes.create(lines(2))
    assert (await processes.ended(job.id)).state == COMPLETED
    listed = (await processes.ask("ListJobs", pb.ListJobsRequest())).jobs
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
    job = await processes.create(lines(2))
    await processes.running(job.id)
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
    done = await processes.ended(job.id)
    assert (done.state, done.reason_code) == (pb.JOB_STATE_FAILED, "PROCESSES_LOST")
    assert "3 jobs processes ended" in done.reason
    gateway.hold.set()
