"""The writer of records when JetStream is slow, away, or was configured otherwise before."""

import asyncio
from pathlib import Path
from typing import Any

import nats
import pytest

from gateway.records import writer
from gateway.records.store import RecordStore
from sluice.errors import RecordUnknown
from sluice.internal.v1.audit_pb2 import AuditEntry
from sluice.settings import RecordsSettings, Settings
from sluice.startup import free_port
from sluice.v1.admin_pb2 import Grade, RequestRecord
from sluice.wire import subjects
from tests.support.nats import running_nats

BOUND_S = 60.0


def opened(**records: Any) -> RecordStore:
    return RecordStore(RecordsSettings(**records), Settings)


async def test_what_is_kept_can_be_found(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    kept = opened()
    await kept.start(client)
    running = asyncio.ensure_future(kept.run())
    try:
        for number in range(200):
            kept.write_record(RequestRecord(request_id=f"req-{number}", tenant="one"))
        await kept.flush(BOUND_S)
        assert (await kept.explain("req-199", None)).record.tenant == "one"
        with pytest.raises(RecordUnknown):
            await kept.explain("req-200", None)
    finally:
        running.cancel()
        await client.close()


async def test_the_requests_of_a_trace_can_be_found(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    kept = opened()
    await kept.start(client)
    running = asyncio.ensure_future(kept.run())
    trace = "ab" * 16
    try:
        for name, tenant, second in (("a", "one", 3), ("b", "two", 1), ("c", "one", 2)):
            record = RequestRecord(request_id=name, tenant=tenant, trace_id=trace)
            record.arrival_time.seconds = second
            kept.write_record(record)
        kept.write_record(RequestRecord(request_id="d", tenant="one", trace_id="cd" * 16))
        await kept.flush(BOUND_S)
        found = await kept.explain_trace(trace, None)
        assert (found.record.request_id, list(found.other_request_ids)) == ("a", ["b", "c"])
        found = await kept.explain_trace(trace, "two")
        assert (found.record.request_id, list(found.other_request_ids)) == ("b", [])
        for unknown in (("ef" * 16, None), (trace, "three")):
            with pytest.raises(RecordUnknown):
                await kept.explain_trace(*unknown)
    finally:
        running.cancel()
        await client.close()


async def test_the_latest_record_of_a_request_counts(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    kept = opened()
    await kept.start(client)
    running = asyncio.ensure_future(kept.run())
    try:
        for policy, trace in (("first", "ab" * 16), ("second", "cd" * 16)):
            kept.write_record(
                RequestRecord(request_id="a", tenant="t", policy=policy, trace_id=trace)
            )
        await kept.flush(BOUND_S)
        assert (await kept.explain("a", None)).record.policy == "second"
        assert (await kept.forget("t")).records == 1
        with pytest.raises(RecordUnknown):
            await kept.explain("a", None)
    finally:
        running.cancel()
        await client.close()


async def test_a_flood_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "QUEUE_MAX_BYTES", 1 << 21)
    kept = opened()
    for number in range(writer.QUEUE_MAX_BYTES // 65_536 + 5):
        kept.write_record(RequestRecord(request_id=f"req-{number}", policy="x" * 65_536))
    assert 5 <= kept.dropped <= 10


async def test_what_no_message_can_hold_is_dropped() -> None:
    kept = opened()
    kept.write_record(RequestRecord(request_id="r", policy="x" * 2_000_000))
    assert kept.dropped == 1


async def test_the_audit_is_full_rather_than_that_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "QUEUE_MAX_BYTES", 1 << 21)
    kept = opened()
    assert not kept.audit_writer.is_full
    for number in range(writer.QUEUE_MAX_BYTES // 65_536):
        kept.append_audit(AuditEntry(request_id=f"r{number}", tenant="t", turns=["x" * 65_536]))
    assert kept.audit_writer.is_full
    assert kept.dropped == 0
    silent = opened(audit_enabled=False)
    silent.append_audit(AuditEntry(request_id="r", tenant="t", turns=["x" * 65_536]))
    assert not silent.audit_writer._bytes


async def test_what_is_written_leaves_room(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "QUEUE_MAX_BYTES", 1)
    client = await nats.connect(nats_url)
    kept = opened()
    await kept.start(client)
    running = asyncio.ensure_future(kept.run())
    try:
        for policy in ("one", "two"):
            kept.append_audit(AuditEntry(request_id="r", tenant="t", policy=policy))
        assert kept.audit_writer.is_full
        await kept.flush(BOUND_S)
        assert not kept.audit_writer.is_full
    finally:
        running.cancel()
        await client.close()


async def test_records_wait_for_a_server_that_comes_back(tmp_path: Path) -> None:
    port = free_port()
    async with running_nats(tmp_path, port) as url:
        client = await nats.connect(url, reconnect_time_wait=0.1, max_reconnect_attempts=-1)  # type: ignore[arg-type]
        kept = opened()
        await kept.start(client)
    running = asyncio.ensure_future(kept.run())
    try:
        kept.write_record(RequestRecord(request_id="req-1", tenant="one"))
        async with running_nats(tmp_path, port):
            await kept.flush(30.0)
            assert (await kept.explain("req-1", None)).record.tenant == "one"
    finally:
        running.cancel()
        await client.close()


async def test_a_later_audit_entry_takes_no_earlier_ones_place(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    kept = opened()
    await kept.start(client)
    running = asyncio.ensure_future(kept.run())
    try:
        for policy in ("one", "two"):
            kept.append_audit(AuditEntry(request_id="req-1", tenant="t", policy=policy))
            await kept.flush(BOUND_S)
        info = await client.jetstream().stream_info(subjects.AUDIT_STREAM)
        assert info.state.messages == 2
        assert (await kept.audit_entry("req-1", None)).policy == "two"
    finally:
        running.cancel()
        await client.close()


async def test_a_newer_record_replaces_an_older_one_wherever_that_is() -> None:
    kept = opened()

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
                kept.write_record(RequestRecord(request_id="req-1", policy="newest"))
                raise TimeoutError
            self.stored.append(payload)

    js: Any = Js()
    kept._client = js
    for policy in ("old", "newer"):
        kept.write_record(RequestRecord(request_id="req-1", policy=policy))
    running = asyncio.ensure_future(kept.run())
    await kept.flush(BOUND_S)
    running.cancel()
    assert [RequestRecord.FromString(one).policy for one in js.stored] == ["newest"]


async def test_new_limits_are_taken_over(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    try:
        await opened(max_mib=1).start(client)
        await opened(max_mib=2).start(client)
        info = await client.jetstream().stream_info(subjects.RECORDS_STREAM)
        assert info.config.max_bytes == 2 * 1024 * 1024
    finally:
        await client.close()


async def test_switched_off_nothing_is_kept_and_explain_says_so() -> None:
    kept = opened(enabled=False, audit_enabled=False)
    kept.write_record(RequestRecord(request_id="req-1"))
    with pytest.raises(RecordUnknown, match=r"records\.enabled"):
        await kept.explain("req-1", None)


async def test_a_tenant_with_a_retention_of_its_own_is_kept_for_it(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    retained = Settings.model_validate({"tenants": {"short": {"retention_h": 1 / 3600}}})
    kept = RecordStore(RecordsSettings(), lambda: retained)
    await kept.start(client)
    running = asyncio.ensure_future(kept.run())
    try:
        for tenant in ("short", "long"):
            kept.write_record(RequestRecord(request_id=f"req-{tenant}", tenant=tenant))
            kept.append_audit(AuditEntry(request_id=f"req-{tenant}", tenant=tenant))
        await kept.flush(BOUND_S)
        assert (await kept.explain("req-short", None)).record.tenant == "short"
        await kept.grade("req-short", Grade(grade=1.0), None)
        streams = (subjects.RECORDS_STREAM, subjects.AUDIT_STREAM)
        async with asyncio.timeout(BOUND_S):
            for stream in streams:
                while (await client.jetstream().stream_info(stream)).state.messages > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert (await kept.explain("req-long", None)).record.tenant == "long"
        assert (await kept.audit_entry("req-long", "long")).tenant == "long"
        with pytest.raises(RecordUnknown):
            await kept.explain("req-short", None)
    finally:
        running.cancel()
        await client.close()


async def test_a_flood_of_one_tenant_pushes_out_no_entries_of_another(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    kept = opened(audit_max_mib=1)
    await kept.start(client)
    running = asyncio.ensure_future(kept.run())
    try:
        for number in range(20):
            kept.append_audit(AuditEntry(request_id=f"calm-{number}", tenant="calm"))
        for number in range(300):
            entry = AuditEntry(request_id=f"req-{number}", tenant="flood", policy="x" * 4000)
            kept.append_audit(entry)
            await kept.flush(BOUND_S)
        for number in range(20):
            assert (await kept.audit_entry(f"calm-{number}", "calm")).tenant == "calm"
        assert (await kept.audit_entry("req-299", "flood")).tenant == "flood"
        state = (await client.jetstream().stream_info(subjects.AUDIT_STREAM)).state
        assert state.bytes <= 0.6 * 2**20 + 20 * 200
        assert state.messages > 100
    finally:
        running.cancel()
        await client.close()
