"""Uploads and results that are kept for a time."""

import asyncio

import nats
import pytest
from google.protobuf.duration_pb2 import Duration

from sluice import errors
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.subjects import JOB_RESULTS_STREAM
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import BOUND_S, Processes, lines

SOON = Duration(nanos=1_000_000)


async def upload(processes: Processes) -> str:
    pieces = [
        pb.UploadInputRequest(name="in.jsonl", data=lines(2)),
        pb.UploadInputRequest(expires_after=SOON),
    ]
    stored = await processes.ask("UploadInput", pieces)
    assert stored.HasField("expire_time")
    return str(stored.upload_id)


async def until_gone(processes: Processes, upload_id: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                await processes.ask("GetUpload", pb.GetUploadRequest(upload_id=upload_id))
            except errors.UploadUnknown:
                return
            await asyncio.sleep(0.02)


async def test_upload_expires_once_no_job_reads_it(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start("one")
    ready, read = await upload(processes), await upload(processes)
    gateway.hold.clear()
    job = await processes.create(input=pb.JobInput(upload_id=read))

    await processes.start("two")  # it looks at all records
    await until_gone(processes, ready)
    assert await processes.ask("GetUpload", pb.GetUploadRequest(upload_id=read))

    gateway.hold.set()
    await processes.ended(job.id)
    await processes.start("three")
    await until_gone(processes, read)


async def test_results_expire_with_a_clear_error(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start("one")
    job = await processes.create(lines(2), results_expire_after=SOON)
    job = await processes.ended(job.id)
    assert job.results_expire_time.ToMilliseconds() == job.end_time.ToMilliseconds() + 1

    with pytest.raises(errors.WrongJobState, match="have expired"):
        await processes.results(job.id)


async def test_expired_results_leave_the_store(processes: Processes, nats_url: str) -> None:
    await processes.start("one")
    kept = await processes.create(lines(2), "kept")
    expired = await processes.create(lines(3), "expired", results_expire_after=SOON)
    for job in (kept, expired):
        await processes.ended(job.id)
    client = await nats.connect(nats_url)
    try:
        streams = client.jetstream()
        before = (await streams.stream_info(JOB_RESULTS_STREAM)).state.messages
        await processes.start("two")  # it looks at all records
        async with asyncio.timeout(BOUND_S):
            while (await streams.stream_info(JOB_RESULTS_STREAM)).state.messages == before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        await client.close()
    assert len(await processes.results(kept.id)) == 2


async def test_expiry_beyond_a_year_is_refused(processes: Processes) -> None:
    await processes.start()
    with pytest.raises(errors.InvalidRequest, match="results_expire_after"):
        await processes.create(lines(1), results_expire_after=Duration(seconds=10**9))
