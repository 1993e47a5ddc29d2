"""Jobs and uploads by their API: once for a key, listed by tenant and state, deleted with all that is theirs alone."""

import hashlib

import grpc
import pytest
from opentelemetry.trace import NoOpTracer

from jobs.process import JobProcess
from jobs.scheduler import JobScheduler
from jobs.service import new_job_id
from sluice import errors
from sluice.client.channel import error_of
from sluice.defaults import TENANT_METADATA
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.settings import JobsSettings
from sluice.telemetry.instruments import Instruments
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import timestamp, unix_ms
from tests.gateway.kit.metrics import values
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import EVERY, Metadata, Processes, lines, of

ACME, OTHER = of("acme"), of("other")
LABELS = {f"label-{number}": "x" for number in range(32)}


async def uploads_of(processes: Processes, metadata: Metadata = ACME) -> set[str]:
    listed = await processes.ask("ListUploads", pb.ListUploadsRequest(), metadata)
    return {one.upload_id for one in listed.uploads}


@pytest.mark.parametrize(
    ("kind", "method", "request_bytes"),
    [
        ("unary_unary", "GetJob", b"\x0a\x02\xff\xff"),
        ("unary_stream", "WatchJob", b"\xff"),
        ("stream_unary", "UploadInput", [b"\x0a\x7f"]),
    ],
)
async def test_bytes_that_are_no_message_are_refused(
    processes: Processes, kind: str, method: str, request_bytes: object
) -> None:
    await processes.start()
    call = getattr(processes.channel, kind)(f"/sluice.v1.JobService/{method}")(request_bytes)
    with pytest.raises(grpc.RpcError) as failed:
        await (call.read() if kind == "unary_stream" else call)
    assert isinstance(error_of(failed.value), errors.InvalidRequest)


async def test_the_same_key_of_a_tenant_is_the_same_job(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    key, before = "k" * 128, unix_ms()
    job = await processes.create(lines(1), key, ACME, labels=LABELS)
    assert (job.tenant, job.id) == ("acme", new_job_id("acme", key))
    assert before <= job.create_time.ToMilliseconds() <= unix_ms()
    # A file that is sent again, labels in another order, and a deadline that counts from now, passed or not.
    labels = dict(reversed(LABELS.items()))
    for late_ms in (10**7, -1):
        limits = pb.JobLimits(deadline_time=timestamp(unix_ms() + late_ms))
        again = await processes.create(lines(1), key, ACME, labels=labels, limits=limits)
        assert again.id == job.id
    for changed in ({"name": "another"}, {"labels": {}}):
        with pytest.raises(errors.IdempotencyConflict):
            await processes.create(lines(1), key, ACME, **{"labels": LABELS, **changed})
    with pytest.raises(errors.IdempotencyConflict):
        await processes.create(lines(2), key, ACME, labels=LABELS)
    # Without a key each is a job of its own; another tenant's key is another's.
    found = {(await processes.create(lines(1), "", ACME)).id for _ in range(2)}
    theirs = await processes.create(lines(1), key, OTHER)
    assert len({job.id, theirs.id, *found}) == 4
    assert theirs.tenant == "other"


def test_ids_of_jobs() -> None:
    for key in ("a", "b/c"):
        digest = hashlib.sha256(f"acme/{key}".encode()).hexdigest()
        assert new_job_id("acme", key) == f"job-{digest[:20]}"
    drawn = {new_job_id("acme", "") for _ in range(100)}
    assert len(drawn) == 100
    assert {len(one) for one in drawn} == {len("job-") + 20}


async def test_lists_have_jobs_of_the_tenant_in_requested_states(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    old = await processes.create(lines(1), metadata=ACME)
    await processes.ended(old.id)
    gateway.hold.clear()
    new = await processes.create(lines(1), metadata=ACME)
    theirs = await processes.create(lines(1), metadata=OTHER)
    for job in (new, theirs):
        await processes.running(job.id)
    done, failed = pb.JOB_STATE_COMPLETED, pb.JOB_STATE_FAILED
    states = [failed] * len(pb.JobState.values())
    for metadata, asked, ids in (
        (ACME, {}, [new.id, old.id]),
        (OTHER, {}, [theirs.id]),
        (EVERY, {}, [theirs.id, new.id, old.id]),
        (ACME, {"states": [done]}, [old.id]),
        (ACME, {"page_size": 1, "states": [done]}, [old.id]),
        (ACME, {"states": states}, []),
    ):
        page = await processes.ask("ListJobs", pb.ListJobsRequest(**asked), metadata)  # type: ignore[arg-type]
        assert [one.id for one in page.jobs] == ids
        totals = {total.state: total.jobs for total in page.totals}
        ours = {} if metadata == OTHER else {done: 1}
        assert totals == {**ours, pb.JOB_STATE_RUNNING: 2 if metadata == EVERY else 1}
    first = await processes.ask("ListJobs", pb.ListJobsRequest(page_size=1), ACME)
    assert [one.id for one in first.jobs] == [new.id]
    rest = pb.ListJobsRequest(page_size=1, page_token=first.next_page_token)
    assert [one.id for one in (await processes.ask("ListJobs", rest, ACME)).jobs] == [old.id]


def test_metric_has_jobs_by_state() -> None:
    instruments = Instruments()
    nothing: object = None  # a scheduler that has not started asks nobody
    process = JobProcess("me", JobsSettings(), nothing, nothing, NoOpTracer(), instruments)  # type: ignore[arg-type]
    JobScheduler(process)
    states = [pb.JOB_STATE_RUNNING, pb.JOB_STATE_RUNNING, pb.JOB_STATE_PAUSED]
    for number, state in enumerate(states):
        job = pb.Job(id=f"j{number}", tenant="acme", state=state)
        process.quotas.job(job.id, JobRecord(job=job))
    process.quotas.job("j2", None)
    counted = {
        dict(labels)["sluice.job.state"]: count
        for labels, count in values(instruments, "sluice.jobs").items()
    }
    assert counted["running"] == 2
    assert counted["paused"] == counted["completed"] == 0


async def test_each_tenant_has_its_own_uploads(processes: Processes) -> None:
    await processes.start()
    mine = {await processes.upload(lines(1), metadata=ACME) for _ in range(2)}
    theirs = await processes.upload(lines(2), "x.jsonl", OTHER)
    for metadata, uploads in ((ACME, mine), (OTHER, {theirs}), (EVERY, {*mine, theirs})):
        assert await uploads_of(processes, metadata) == uploads
    asked, found = pb.ListUploadsRequest(page_size=1), list[str]()
    for _ in range(2):
        page = await processes.ask("ListUploads", asked, ACME)
        found += [one.upload_id for one in page.uploads]
        asked.page_token = page.next_page_token
    assert (set(found), asked.page_token) == (mine, "")

    get = pb.GetUploadRequest(upload_id=theirs)
    with pytest.raises(errors.UploadUnknown):
        await processes.ask("GetUpload", get, ACME)
    (shown,) = (await processes.ask("ListUploads", pb.ListUploadsRequest(), OTHER)).uploads
    for metadata in (OTHER, EVERY):
        one = await processes.ask("GetUpload", get, metadata)
        assert (one.name, one.size_bytes) == ("x.jsonl", len(lines(2)))
        assert one.sha256 == hashlib.sha256(lines(2)).digest()
        assert one.create_time.seconds > 0
        told = (shown.name, shown.size_bytes, shown.create_time)
        assert told == (one.name, one.size_bytes, one.create_time)


async def test_ended_job_is_deleted_with_its_last_used_upload(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    upload, elsewhere = [await processes.upload(lines(n), metadata=ACME) for n in (1, 2)]
    first, second, third = [
        (await processes.create(input=pb.JobInput(upload_id=one), metadata=ACME)).id
        for one in (upload, upload, elsewhere)
    ]
    for job in (first, second, third):
        await processes.ended(job)
    gateway.hold.clear()
    running = await processes.create(input=pb.JobInput(upload_id=elsewhere), metadata=ACME)
    with pytest.raises(errors.WrongJobState, match="cancel it first"):
        await processes.delete(running.id)
    delete = pb.DeleteUploadRequest(upload_id=elsewhere)
    with pytest.raises(errors.WrongJobState):
        await processes.ask("DeleteUpload", delete, ACME)
    await processes.cancel(running.id)
    gateway.hold.set()

    for job, left in ((first, {upload, elsewhere}), (second, {elsewhere})):
        await processes.delete(job)
        assert await uploads_of(processes) == left
        for gone in (processes.get(job), processes.results(job)):
            with pytest.raises(errors.JobUnknown):
                await gone
    listed = await processes.ask("ListJobs", pb.ListJobsRequest(), ACME)
    assert {one.id for one in listed.jobs} == {third, running.id}
    # An upload goes when no job reads it any more.
    await processes.when(running.id, lambda one: not one.closing)
    await processes.ask("DeleteUpload", delete, ACME)
    assert await uploads_of(processes) == set()


@pytest.mark.parametrize("tenant", ["a.b", "*", ">", "x" * 65, ""])
async def test_what_is_no_tenant_has_no_jobs(processes: Processes, tenant: str) -> None:
    await processes.start()
    with pytest.raises(errors.InvalidRequest) as refused:
        await processes.ask("ListJobs", pb.ListJobsRequest(), of(tenant))
    assert [one.field for one in refused.value.violations] == [TENANT_METADATA]
