"""Which inputs outside of the mesh are a tenant's."""

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from jobs.core.retry import ItemRetryPolicy
from jobs.outbound import Outbound, check_url
from jobs.quotas import Quotas
from jobs.uploads import ExternalAccess, SourceUnreachable
from sluice.errors import InvalidRequest, TransportUnavailable
from sluice.settings import JobsSettings
from sluice.v1.jobs_pb2 import JobInput, JobSpec, JobWebhook
from tests.jobs.processes import BOUND_S


@pytest.fixture
def outside() -> ExternalAccess:
    settings = JobsSettings(
        input_prefixes=["s3://all", "s3://each/{tenant}", "s3://payroll"],
        input_streams={"ALL": ["all.>"], "EACH": ["each.{tenant}.>"], "PAYROLL": ["payroll.>"]},
        input_tenants={"s3://payroll": ["hr"], "PAYROLL": ["hr"]},
    )
    return ExternalAccess(settings)


@pytest.mark.parametrize(
    ("tenant", "url", "taken"),
    [
        ("acme", "s3://all/in.jsonl", True),
        ("acme", "s3://each/acme/in.jsonl", True),
        ("acme", "s3://each/hr/in.jsonl", False),
        ("acme", "s3://each/acme-2/in.jsonl", False),
        ("acme", "s3://each/{tenant}/in.jsonl", False),
        ("acme", "s3://payroll/in.jsonl", False),
        ("hr", "s3://payroll/in.jsonl", True),
    ],
)
def test_a_prefix_may_be_that_of_some_tenants(
    outside: ExternalAccess, tenant: str, url: str, taken: bool
) -> None:
    if taken:
        check_url(url, outside.prefixes_of(tenant))
        return
    with pytest.raises(InvalidRequest, match="not below any prefix") as refused:
        check_url(url, outside.prefixes_of(tenant))
    assert "payroll" not in refused.value.message.split("allows")[1], "others' are not told"


@pytest.mark.parametrize(
    ("tenant", "subject", "stream"),
    [
        ("acme", "all.nightly", "ALL"),
        ("acme", "each.acme.nightly", "EACH"),
        ("acme", "each.hr.nightly", None),
        ("acme", "each.*.nightly", None),
        ("acme", "payroll.nightly", None),
        ("hr", "payroll.nightly", "PAYROLL"),
    ],
)
def test_a_stream_may_be_that_of_some_tenants(
    outside: ExternalAccess, tenant: str, subject: str, stream: str | None
) -> None:
    given = JobInput(nats_subject=subject)
    if stream is not None:
        assert outside.stream_of(tenant, given) == stream
        return
    with pytest.raises(InvalidRequest, match="not among the subjects"):
        outside.stream_of(tenant, given)


def test_tenants_of_what_is_not_listed_are_a_mistake() -> None:
    with pytest.raises(ValueError, match=re.escape("'s3://b' is neither in input_prefixes nor")):
        JobsSettings(input_prefixes=["s3://a"], input_tenants={"s3://b": ["acme"]})


async def test_silent_webhooks_do_not_block_job_creation(
    outside: ExternalAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    hook = JobWebhook(url="https://127.0.0.1/", secret="a secret of enough characters")
    monkeypatch.setattr(Outbound, "post", lambda *_: stuck.wait(BOUND_S) and 200)
    monkeypatch.setattr(Outbound, "check", lambda *_: None)
    sending = [asyncio.ensure_future(outside.post("acme", hook.url, {}, b"")) for _ in range(4)]
    try:
        spec = JobSpec(webhook=hook)
        async with asyncio.timeout(BOUND_S):
            await outside.check(cast(Any, None), "acme", spec)
        assert not any(one.done() for one in sending)
    finally:
        stuck.set()
        await asyncio.gather(*sending)
        outside.close()


@pytest.mark.parametrize(("failures", "tried"), [(2, 3), (9, 3)], ids=["passing", "for-good"])
async def test_unreachable_input_is_tried_again_with_growing_waits(
    outside: ExternalAccess, monkeypatch: pytest.MonkeyPatch, failures: int, tried: int
) -> None:
    opened, waits = list[str](), list[str]()

    def read_url(url: str, *_: object) -> Iterator[bytes]:
        opened.append(url)
        yield b"begun"
        if len(opened) <= failures:
            raise TransportUnavailable(f"refused {len(opened)}")

    monkeypatch.setattr("jobs.uploads.read_url", read_url)
    store, policy = StoredUploads(), ItemRetryPolicy(retries=2, first_wait_s=0.001)
    quotas = Quotas(JobsSettings())
    fetching = outside.fetch(cast(Any, store), "acme", "s3://all/in", quotas, waits.append, policy)
    if failures < tried:
        assert await fetching in store.kept
    else:
        with pytest.raises(SourceUnreachable, match="refused 3"):
            await fetching
    assert (len(opened), waits) == (tried, ["refused 1", "refused 2"])
    assert len(store.kept) == len(quotas.uploads) == (failures < tried), "nothing is left of others"
    outside.close()


class StoredUploads:
    """Keeps the names of uploads."""

    def __init__(self) -> None:
        self.kept = set[str]()

    async def write_upload(self, upload: str, *_: object) -> None:
        self.kept.add(upload)

    async def write_chunk(self, *_: object) -> None:
        pass

    async def delete_upload(self, upload: str) -> None:
        self.kept.remove(upload)
