"""A tenant that writes much loses its own oldest messages, not those of others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest

from gateway.records.store import RecordStore
from sluice.errors import RecordUnknown
from sluice.internal.v1.audit_pb2 import AuditEntry
from sluice.settings import RecordsSettings, Settings
from sluice.v1.admin_pb2 import RequestRecord

BOUND_S = 60.0
LONG = "x" * 4000


@asynccontextmanager
async def opened(nats_url: str, **records: Any) -> AsyncIterator[RecordStore]:
    client = await nats.connect(nats_url)
    store = RecordStore(RecordsSettings(**records), Settings)
    await store.start(client)
    running = asyncio.ensure_future(store.run())
    try:
        yield store
    finally:
        running.cancel()
        await asyncio.wait([running])
        await client.close()


async def is_gone(read: Any) -> bool:
    try:
        await read
    except RecordUnknown:
        return True
    return False


async def test_tenant_that_floods_leaves_records_of_others(nats_url: str) -> None:
    async with opened(nats_url, max_mib=1, tenant_share=0.25) as store:
        store.write_record(RequestRecord(request_id="quiet", tenant="quiet"))
        for number in range(400):  # 1.6 MiB
            record = RequestRecord(request_id=f"loud-{number}", tenant="loud", policy=LONG)
            store.write_record(record)
            if number % 50 == 0:
                await store.flush(BOUND_S)
        await store.flush(BOUND_S)
        assert (await store.explain("quiet", None)).record.tenant == "quiet"
        assert (await store.explain("loud-399", None)).record.tenant == "loud"
        async with asyncio.timeout(BOUND_S):
            while not await is_gone(store.explain("loud-100", None)):  # noqa: ASYNC110, the stream has no event
                await asyncio.sleep(0.05)


async def test_forgotten_tenant_leaves_records_of_others(nats_url: str) -> None:
    async with opened(nats_url) as store:
        for tenant in ("one", "two"):
            store.write_record(RequestRecord(request_id=f"of-{tenant}", tenant=tenant))
        await store.flush(BOUND_S)
        assert (await store.forget("one")).records == 1
        with pytest.raises(RecordUnknown):
            await store.explain("of-one", None)
        await store.explain("of-two", None)


async def test_tenant_that_floods_leaves_audit_of_others(nats_url: str) -> None:
    async with opened(nats_url, audit_max_mib=1, audit_tenant_share=0.25) as store:
        store.append_audit(AuditEntry(request_id="quiet", tenant="quiet"))
        for number in range(400):
            entry = AuditEntry(request_id=f"loud-{number}", tenant="loud", policy=LONG)
            store.append_audit(entry)
            if number % 50 == 0:
                await store.flush(BOUND_S)
        await store.flush(BOUND_S)
        await store.audit_entry("quiet", "quiet")
        async with asyncio.timeout(BOUND_S):
            while not await is_gone(store.audit_entry("loud-100", "loud")):  # noqa: ASYNC110, the stream has no event
                await asyncio.sleep(0.05)
