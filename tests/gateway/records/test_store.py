"""The store of records when JetStream is slow, away, or was configured otherwise before; and the shares of tenants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from gateway.records.store import RecordStore
from gateway.records.writer import BackgroundWriter
from sluice.errors import RecordUnknown
from sluice.internal.v1.audit_pb2 import AuditEntry
from sluice.settings import RecordsSettings, Settings
from sluice.startup import free_port
from sluice.v1.admin_pb2 import Grade, RequestRecord
from sluice.wire import subjects
from tests.support.nats import running_nats
from tests.support.settings import tuned

BOUND_S = 60.0
LONG = "x" * 4000


def new_store(in_force: Callable[[], Settings] = Settings, **records: Any) -> RecordStore:
    return RecordStore(tuned(RecordsSettings, **records), in_force)


@asynccontextmanager
async def running(client: Any, store: RecordStore) -> AsyncIterator[RecordStore]:
    await store.start(client)
    task = asyncio.ensure_future(store.run())
    try:
        yield store
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    connected = await nats.connect(nats_url)
    yield connected
    await connected.close()


@pytest.fixture
async def store(client: Client) -> AsyncIterator[RecordStore]:
    async with running(client, new_store()) as store:
        yield store


async def messages_in(client: Client, stream: str) -> int:
    return (await client.jetstream().stream_info(stream)).state.messages


async def is_gone(read: Any) -> bool:
    try:
        await read
    except RecordUnknown:
        return True
    return False


async def test_requests_of_a_trace_can_be_found(store: RecordStore) -> None:
    trace = "ab" * 16
    for name, tenant, second in (("a", "one", 3), ("b", "two", 1), ("c", "one", 2)):
        record = RequestRecord(request_id=name, tenant=tenant, trace_id=trace)
        record.arrival_time.seconds = second
        store.write_record(record)
    store.write_record(RequestRecord(request_id="d", tenant="one", trace_id="cd" * 16))
    await store.flush(BOUND_S)
    for tenant, latest, others in ((None, "a", ["b", "c"]), ("two", "b", [])):
        response = await store.explain_trace(trace, tenant)
        assert (response.record.request_id, list(response.other_request_ids)) == (latest, others)
    for unknown in (("ef" * 16, None), (trace, "three")):
        assert await is_gone(store.explain_trace(*unknown))


async def test_the_latest_record_of_a_request_counts(store: RecordStore) -> None:
    for policy, trace in (("first", "ab" * 16), ("second", "cd" * 16)):
        store.write_record(RequestRecord(request_id="a", tenant="t", policy=policy, trace_id=trace))
    store.write_record(RequestRecord(request_id="other", tenant="u"))
    await store.flush(BOUND_S)
    assert (await store.explain("a", None)).record.policy == "second"
    assert (await store.forget("t")).records == 1
    assert await is_gone(store.explain("a", None))
    assert not await is_gone(store.explain("other", None))


async def test_floods_and_large_records_are_dropped_and_counted() -> None:
    store = RecordStore(RecordsSettings(), Settings, queue_max_bytes=1 << 21)
    store.write_record(RequestRecord(request_id="r", policy="x" * 2_000_000))
    assert store.dropped == 1
    for number in range((1 << 21) // 65_536 + 5):
        store.write_record(RequestRecord(request_id=f"req-{number}", policy="x" * 65_536))
    assert 6 <= store.dropped <= 11


@pytest.mark.parametrize("enabled", [True, False])
async def test_audit_entries_fill_the_queue_and_are_not_dropped(enabled: bool) -> None:
    settings = RecordsSettings(audit_max_mib=1024 if enabled else 0)
    store = RecordStore(settings, Settings, queue_max_bytes=1 << 21)
    assert not store.audit_writer.is_full
    for number in range((1 << 21) // 65_536):
        store.append_audit(AuditEntry(request_id=f"r{number}", tenant="t", turns=["x" * 65_536]))
    assert store.audit_writer.is_full is enabled
    assert store.dropped == 0


async def test_written_entries_free_the_queue(client: Client) -> None:
    async with running(
        client, RecordStore(RecordsSettings(), Settings, queue_max_bytes=1)
    ) as store:
        for policy in ("one", "two"):
            store.append_audit(AuditEntry(request_id="r", tenant="t", policy=policy))
        assert store.audit_writer.is_full
        await store.flush(BOUND_S)
        assert not store.audit_writer.is_full


async def test_records_wait_for_a_server_that_comes_back(tmp_path: Path) -> None:
    port, store = free_port(), new_store()
    async with running_nats(tmp_path, port) as url:
        client = await nats.connect(url, reconnect_time_wait=0.1, max_reconnect_attempts=-1)  # type: ignore[arg-type]
        await store.start(client)
    task = asyncio.ensure_future(store.run())
    try:
        store.write_record(RequestRecord(request_id="req-1", tenant="one"))
        async with running_nats(tmp_path, port):
            await store.flush(30.0)
            assert (await store.explain("req-1", None)).record.tenant == "one"
    finally:
        task.cancel()
        await client.close()


async def test_a_later_audit_entry_does_not_replace_an_earlier_one(
    client: Client, store: RecordStore
) -> None:
    for policy in ("one", "two"):
        store.append_audit(AuditEntry(request_id="req-1", tenant="t", policy=policy))
        await store.flush(BOUND_S)
    assert await messages_in(client, subjects.AUDIT_STREAM) == 2
    assert (await store.audit_entry("req-1", None)).policy == "two"


async def test_a_failed_write_does_not_replace_a_newer_record() -> None:
    writer = BackgroundWriter()

    class Js:
        """Fails once, and meanwhile a newer record comes."""

        def __init__(self) -> None:
            self.stored: list[bytes] = []
            self.failed = False

        def jetstream(self) -> "Js":
            return self

        async def publish(
            self, subject: str, payload: bytes, timeout: float, msg_ttl: float | None = None
        ) -> None:
            if not self.failed:
                self.failed = True
                writer.put("record", b"newest")
                raise TimeoutError
            self.stored.append(payload)

    js: Any = Js()
    for payload in (b"old", b"newer"):
        writer.put("record", payload)
    task = asyncio.ensure_future(writer.run(js))
    await writer.flush(BOUND_S)
    task.cancel()
    assert js.stored == [b"newest"]


async def test_new_limits_of_a_stream_are_set(client: Client) -> None:
    await new_store(max_mib=1).start(client)
    await new_store(max_mib=2).start(client)
    info = await client.jetstream().stream_info(subjects.RECORDS_STREAM)
    assert info.config.max_bytes == 2 * 1024 * 1024


async def test_explain_says_that_records_are_disabled() -> None:
    store = new_store(max_mib=0, audit_max_mib=0)
    store.write_record(RequestRecord(request_id="req-1"))
    with pytest.raises(RecordUnknown, match=r"records\.max_mib"):
        await store.explain("req-1", None)


async def test_a_tenant_can_have_its_own_retention(client: Client) -> None:
    retained = Settings.model_validate({"tenants": {"short": {"retention_h": 1 / 3600}}})
    async with running(client, new_store(lambda: retained)) as store:
        for tenant in ("short", "long"):
            store.write_record(RequestRecord(request_id=f"req-{tenant}", tenant=tenant))
            store.append_audit(AuditEntry(request_id=f"req-{tenant}", tenant=tenant))
        await store.flush(BOUND_S)
        assert (await store.explain("req-short", None)).record.tenant == "short"
        await store.grade("req-short", Grade(grade=1.0), None)
        async with asyncio.timeout(BOUND_S):
            for stream in (subjects.RECORDS_STREAM, subjects.AUDIT_STREAM):
                while await messages_in(client, stream) > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert (await store.explain("req-long", None)).record.tenant == "long"
        assert (await store.audit_entry("req-long", "long")).tenant == "long"
        assert await is_gone(store.explain("req-short", None))


@pytest.mark.parametrize("kind", ["records", "audit"])
async def test_a_flood_does_not_displace_other_tenants(client: Client, kind: str) -> None:
    store = new_store(max_mib=1, audit_max_mib=1, tenant_share=0.25)
    write: dict[str, Any] = {
        "records": lambda **fields: store.write_record(RequestRecord(**fields)),
        "audit": lambda **fields: store.append_audit(AuditEntry(**fields)),
    }
    read: dict[str, Any] = {"records": store.explain, "audit": store.audit_entry}
    async with running(client, store):
        write[kind](request_id="quiet", tenant="quiet", policy=LONG)
        for number in range(400):  # 1.6 MiB
            write[kind](request_id=f"loud-{number}", tenant="loud", policy=LONG)
            if number % 50 == 0:
                await store.flush(BOUND_S)
        await store.flush(BOUND_S)
        await read[kind]("quiet", "quiet")
        await read[kind]("loud-399", "loud")
        async with asyncio.timeout(BOUND_S):
            while not await is_gone(read[kind]("loud-100", "loud")):  # noqa: ASYNC110, the stream has no event
                await asyncio.sleep(0.05)
