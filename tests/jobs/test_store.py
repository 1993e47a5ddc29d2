"""What jobs keep in JetStream, with a real nats-server: whose it is, and who may write behind whom."""

import re
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js.errors import APIError

from jobs.stage_attempt import OUTCOME_BYTES_MAX
from jobs.store import CHUNK_BYTES, SEGMENT_BYTES_MAX, Fenced, JobStore
from sluice.errors import (
    InvalidRequest,
    JobUnknown,
    StorageFull,
    TransportUnavailable,
    UploadUnknown,
    WrongJobState,
)
from sluice.internal.v1.job_pb2 import (
    ItemOutcome,
    JobCheckpoint,
    JobRecord,
    JobSegment,
    MessageChunk,
    UploadRecord,
)
from sluice.settings import JobsSettings
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.codec import MAX_MESSAGE_BYTES

NO_TOKENS = ("", "*", ">", "a.b", "upload.x", "a b")


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    connected = await nats.connect(nats_url)
    yield connected
    await connected.close()


@pytest.fixture
async def store(client: Client) -> JobStore:
    started = JobStore(JobsSettings(), 1)
    await started.start(client)
    return started


def record(job: str = "job-1", **fields: Any) -> JobRecord:
    return JobRecord(job=pb.Job(id=job, tenant="acme"), **fields)


def segment(position: int) -> JobSegment:
    return JobSegment(
        outcomes=[ItemOutcome(position=position)], checkpoint=JobCheckpoint(low_water=position)
    )


async def test_a_record_is_created_once_and_written_over_what_was_read(store: JobStore) -> None:
    assert await store.create(record(attempt=1))
    assert not await store.create(record(attempt=2))
    found, revision = await store.read("job-1")
    assert found == record(attempt=1)
    later = await store.write(record(attempt=3), revision)
    assert later is not None
    assert later > revision
    assert await store.write(record(attempt=4), revision) is None
    assert (await store.read("job-1"))[0].attempt == 3


async def test_a_job_that_is_not_there_is_unknown(store: JobStore) -> None:
    await store.create(record())
    await store.write_upload("x", UploadRecord(tenant="acme"))
    for job in ("job-2", *NO_TOKENS):
        with pytest.raises(JobUnknown, match=re.escape(repr(job))):
            await store.read(job)


async def test_a_change_is_made_to_the_record_as_it_is_now(store: JobStore) -> None:
    await store.create(record())
    write, lost = store.write, list[int]()

    async def write_late(given: JobRecord, revision: int) -> int | None:
        if len(lost) < 2:  # another one was faster
            lost.append(revision)
            await write(record(attempt=10 * len(lost)), revision)
        return await write(given, revision)

    store.write = write_late  # type: ignore[method-assign]

    def edit(given: JobRecord) -> None:
        given.attempt += 1

    changed = await store.change("job-1", edit)
    assert changed.attempt == 21
    assert (await store.read("job-1"))[0].attempt == 21
    assert lost == sorted(set(lost))

    def refuse(_: JobRecord) -> None:
        raise WrongJobState("no")

    with pytest.raises(WrongJobState):
        await store.change("job-1", refuse)
    with pytest.raises(JobUnknown):
        await store.change("job-2", edit)


async def test_a_change_is_given_up_when_others_write_again_and_again(store: JobStore) -> None:
    await store.create(record())
    tries = list[int]()

    async def never(_: JobRecord, revision: int) -> None:
        tries.append(revision)

    store.write = never  # type: ignore[method-assign,assignment]
    with pytest.raises(TransportUnavailable, match="job job-1 is written by others") as refused:
        await store.change("job-1", lambda record: None)
    assert len(tries) == 20
    assert refused.value.retry_after_s == 1.0


async def test_jobs_and_uploads_are_listed_apart(store: JobStore) -> None:
    for job in ("a", "b"):
        await store.create(record(job))
    await store.write_upload("u", UploadRecord(tenant="acme", name="in"))
    assert {one.job.id async for one in store.records()} == {"a", "b"}
    assert [one async for one in store.uploads()] == [("u", UploadRecord(tenant="acme", name="in"))]


async def test_an_upload_is_there_when_it_is_complete(store: JobStore) -> None:
    await store.create(record("job-1"))
    await store.write_upload("u", UploadRecord(tenant="acme"))
    for upload in ("u", "v", "job-1", *NO_TOKENS):
        with pytest.raises(UploadUnknown, match=re.escape(repr(upload))):
            await store.upload(upload)
    done = UploadRecord(tenant="acme", complete_unix_ms=5)
    await store.write_upload("u", done)
    assert await store.upload("u") == done


async def filled(store: JobStore, job: str, upload: str) -> None:
    await store.create(record(job, upload_id=upload))
    await store.write_upload(upload, UploadRecord(tenant="acme", complete_unix_ms=5))
    await store.write_chunk(upload, 0, upload.encode())
    last = await store.append(job, 0, 0, segment(1), 0)
    await store.append(job, 0, 0, segment(2), last)
    await store.append(job, 1, 2, segment(3), 0)


@pytest.mark.parametrize("with_upload", [True, False])
async def test_a_job_is_deleted_with_all_of_it_and_nothing_else(
    store: JobStore, with_upload: bool
) -> None:
    await filled(store, "job-1", "u")
    await filled(store, "job-10", "uu")
    await store.delete("job-1", "u" if with_upload else "")
    with pytest.raises(JobUnknown):
        await store.read("job-1")
    for stage, attempt in ((0, 0), (1, 2)):
        assert await store.last_segment("job-1", stage, attempt) == (JobSegment(), 0)
        assert (await store.last_segment("job-10", stage, attempt))[1] > 0
    assert (await store.read("job-10"))[0].upload_id == "uu"
    assert await store.read_chunk("uu", 0) == b"uu"
    if with_upload:
        for gone in (store.upload("u"), store.read_chunk("u", 0)):
            with pytest.raises(UploadUnknown):
                await gone
    else:
        assert await store.read_chunk("u", 0) == b"u"
        assert (await store.upload("u")).complete_unix_ms == 5


async def test_a_chunk_may_be_empty_and_a_missing_one_is_told(store: JobStore) -> None:
    await store.write_chunk("u", 0, b"")
    await store.write_chunk("u", 1, b"x")
    assert [await store.read_chunk("u", number) for number in (0, 1)] == [b"", b"x"]
    with pytest.raises(UploadUnknown, match="upload u was deleted"):
        await store.read_chunk("u", 2)


async def test_a_chunk_of_messages_is_stored_once(store: JobStore) -> None:
    assert await store.read_messages("u", 0) is None
    chunk = MessageChunk(messages=[b"x"], count=1, sequence=4)
    await store.write_messages("u", 0, chunk)
    with pytest.raises(Fenced):
        await store.write_messages("u", 0, MessageChunk(messages=[b"y"]))
    assert await store.read_messages("u", 0) == chunk
    await store.write_messages("u", 1, chunk)
    await store.write_messages("v", 0, chunk)


async def test_messages_of_an_operators_stream(store: JobStore, client: Client) -> None:
    with pytest.raises(InvalidRequest, match="no stream events") as refused:
        await store.read_message("events", "orders.a", 1)
    assert [one.field for one in refused.value.violations] == ["spec.input.nats_subject"]
    jetstream = client.jetstream()
    await jetstream.add_stream(name="events", subjects=["orders.*"])
    assert await store.read_message("events", "orders.a", 1) is None
    for subject, data in (("a", b"1"), ("b", b"2"), ("a", b""), ("a", b"4")):
        await jetstream.publish(f"orders.{subject}", data)
    assert await store.read_message("events", "orders.a", 1) == (b"1", 1)
    assert await store.read_message("events", "orders.a", 2) == (b"", 3)
    assert await store.read_message("events", "orders.a", 5) is None
    await jetstream.delete_stream("events")


async def test_a_segment_is_appended_behind_the_last_one_alone(store: JobStore) -> None:
    assert await store.last_segment("job-1", 0, 0) == (JobSegment(), 0)
    first = await store.append("job-1", 0, 0, segment(1), 0)
    for wrong in (0, first + 1):
        with pytest.raises(Fenced, match="job-1"):
            await store.append("job-1", 0, 0, segment(2), wrong)
    # Every pass has a log of its own.
    others = [
        await store.append("job-2", 0, 0, segment(9), 0),
        await store.append("job-1", 1, 0, segment(9), 0),
        await store.append("job-1", 0, 1, segment(9), 0),
    ]
    second = await store.append("job-1", 0, 0, segment(2), first)
    assert second > max(others) > first
    assert await store.last_segment("job-1", 0, 0) == (segment(2), second)
    assert await store.segment_at("job-1", 0, 0, 1) == (segment(1), first)
    assert await store.segment_at("job-1", 0, 0, first + 1) == (segment(2), second)
    assert await store.segment_at("job-1", 0, 0, second + 1) is None
    assert await store.segment_at("job-9", 0, 0, 1) is None


async def test_a_full_store_says_what_to_do(client: Client) -> None:
    small = JobStore(JobsSettings(results_max_bytes=1024**2), 1)
    await small.start(client)
    large = JobSegment(outcomes=[ItemOutcome(input_hash=b"x" * 600_000)])
    last = await small.append("job-1", 0, 0, large, 0)
    with pytest.raises(StorageFull, match=r"raise\s+jobs\.results_max_bytes"):
        await small.append("job-1", 0, 0, large, last)


class Refusing:
    """A JetStream that answers everything with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def _refuse(self, *_: Any, **__: Any) -> None:
        raise self._error

    publish = get_msg = get_last_msg = purge_stream = _refuse


@pytest.mark.parametrize(
    ("code", "error"),
    [
        *((code, StorageFull) for code in (10023, 10047, 10077, 10122)),
        *((code, Fenced) for code in (10071, 10164)),
        *((code, TransportUnavailable) for code in (10008, 10024, 10048, 10072, 10078, 10123)),
    ],
)
async def test_what_jetstream_refuses_by_its_code(code: int, error: type[Exception]) -> None:
    store = JobStore(JobsSettings(), 1)
    store.jetstream = Refusing(APIError(code=503, err_code=code, description="it says"))  # type: ignore[assignment]
    with pytest.raises(error) as refused:
        await store.append("job-1", 0, 0, segment(1), 0)
    assert error is Fenced or "it says" in str(refused.value)


@pytest.mark.parametrize("error", [None, TimeoutError(), nats.errors.ConnectionClosedError()])
async def test_jetstream_outage_is_not_reported_as_missing(error: Exception | None) -> None:
    store = JobStore(JobsSettings(), 1)
    if error is not None:  # else it is not connected yet
        store.jetstream = Refusing(error)  # type: ignore[assignment]
    calls = (
        store.append("job-1", 0, 0, segment(1), 0),
        store.segment_at("job-1", 0, 0, 1),
        store.last_segment("job-1", 0, 0),
        store.read_chunk("u", 0),
        store.read_messages("u", 0),
        store.read_message("events", "a", 1),
        store.delete_upload("u"),
    )
    for call in calls:
        with pytest.raises(TransportUnavailable) as refused:
            await call
        assert refused.value.retry_after_s == 1.0


def test_segment_with_a_largest_outcome_fits_into_a_message() -> None:
    kib = 1024
    assert (512 * kib, 768 * kib, 192 * kib) == (CHUNK_BYTES, SEGMENT_BYTES_MAX, OUTCOME_BYTES_MAX)
    assert SEGMENT_BYTES_MAX + OUTCOME_BYTES_MAX < MAX_MESSAGE_BYTES
