"""Totals of jobs by state: in the list of a tenant, and as a metric of all."""

from typing import Any

from opentelemetry.trace import NoOpTracer

from jobs.process import JobProcess
from jobs.scheduler import JobScheduler
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.settings import JobsSettings
from sluice.telemetry import names
from sluice.telemetry.instruments import Instruments
from sluice.v1 import jobs_pb2 as pb
from tests.gateway.kit.metrics import values
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes, lines
from tests.jobs.test_service import ACME, EVERY, OTHER, Metadata, create, ended, upload_of


async def running(stub: Any, job: pb.Job, metadata: Metadata) -> None:
    """Return when the job runs."""
    async for seen in stub.WatchJob(pb.WatchJobRequest(id=job.id), metadata=metadata):
        if seen.job.state == pb.JOB_STATE_RUNNING:
            return


async def test_list_has_totals_of_jobs_by_state(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    stub = processes.stub
    upload, theirs = await upload_of(stub, lines(1)), await upload_of(stub, lines(1), OTHER)
    await ended(stub, await create(stub, upload))
    gateway.hold.clear()
    ours_now = await create(stub, upload)
    theirs_now = await create(stub, theirs, OTHER)

    async def totals(metadata: Metadata, **asked: Any) -> dict[int, int]:
        page = await stub.ListJobs(pb.ListJobsRequest(**asked), metadata=metadata)
        return {total.state: total.jobs for total in page.totals}

    for job, metadata in ((ours_now, ACME), (theirs_now, OTHER)):
        await running(stub, job, metadata)
    ours = {pb.JOB_STATE_COMPLETED: 1, pb.JOB_STATE_RUNNING: 1}
    assert await totals(ACME) == ours
    assert await totals(ACME, page_size=1, states=[pb.JOB_STATE_FAILED]) == ours
    assert await totals(EVERY) == {pb.JOB_STATE_COMPLETED: 1, pb.JOB_STATE_RUNNING: 2}


def test_metric_has_jobs_by_state() -> None:
    instruments = Instruments()
    nothing: Any = None  # a scheduler that has not started asks nobody
    process = JobProcess("me", JobsSettings(), nothing, nothing, NoOpTracer(), instruments)
    JobScheduler(process)
    for number, state in enumerate(
        [pb.JOB_STATE_RUNNING, pb.JOB_STATE_RUNNING, pb.JOB_STATE_PAUSED]
    ):
        job = pb.Job(id=f"j{number}", tenant="acme", state=state)
        process.quotas.job(job.id, JobRecord(job=job))
    process.quotas.job("j2", None)
    counted = {
        dict(labels)[names.JOB_STATE]: count
        for labels, count in values(instruments, "sluice.jobs").items()
    }
    assert counted["running"] == 2
    assert counted["paused"] == counted["completed"] == 0
