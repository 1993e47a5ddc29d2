"""What each tenant has in the store of jobs, by the records as they change."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import pytest

from jobs.quotas import JobUsage, Quotas
from sluice.errors import LimitReached, StorageFull, TransportUnavailable
from sluice.internal.v1.job_pb2 import JobRecord, UploadRecord
from sluice.settings import JobsSettings
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import timestamp
from tests.support.settings import tuned

MIB = 1024**2
BYTES: tuple[Literal["inputs", "results"], ...] = ("inputs", "results")
SETTINGS = tuned(
    JobsSettings,
    tenant_jobs_max=2,
    tenant_share=0.25,
    running_max=10,
    inputs_max_bytes=40 * MIB,
    results_max_bytes=80 * MIB,
)


def job(tenant: str = "acme", results: int = 0, upload: str = "u") -> JobRecord:
    shown = pb.Job(tenant=tenant, state=pb.JOB_STATE_RUNNING, create_time=timestamp(5000))
    return JobRecord(job=shown, results_bytes=results, upload_id=upload)


def upload(tenant: str = "acme", size: int = 0) -> UploadRecord:
    return UploadRecord(tenant=tenant, size_bytes=size)


def allowed(error: type[Exception] | None, match: str = "") -> AbstractContextManager[object]:
    return nullcontext() if error is None else pytest.raises(error, match=match)


def put(quotas: Quotas, what: str, name: str, tenant: str | None) -> None:
    if what == "jobs":
        quotas.job(name, None if tenant is None else job(tenant))
    else:
        quotas.upload(name, None if tenant is None else upload(tenant))


@pytest.mark.parametrize(("what", "limit"), [("jobs", 2), ("uploads", 4)])
def test_a_tenant_has_so_many(what: Literal["jobs", "uploads"], limit: int) -> None:
    quotas = Quotas(SETTINGS)
    for number in range(limit):
        quotas.check_count("acme", what)
        put(quotas, what, f"{number}", "acme")
        put(quotas, what, f"{number}", "acme")  # the second record of one is the same one
    with pytest.raises(LimitReached, match=f"has {limit} {what}; delete unused ones") as refused:
        quotas.check_count("acme", what)
    assert refused.value.retry_after_s == 30.0
    assert refused.value.metadata == {
        "subject": "tenant acme",
        "limit": "jobs.tenant_jobs_max",
        "value": f"{limit}",
    }
    quotas.check_count("other", what)
    put(quotas, what, "0", None)
    put(quotas, what, "unknown", None)
    quotas.check_count("acme", what)


@pytest.mark.parametrize(
    ("inputs", "results", "tenant", "full"),
    [
        (10 * MIB - 1, 20 * MIB - 1, "acme", ""),
        (10 * MIB, 0, "acme", "inputs"),
        (0, 20 * MIB, "acme", "results"),
        (10 * MIB, 20 * MIB, "other", ""),
    ],
    ids=["just-below", "inputs", "results", "of-another"],
)
def test_bytes_up_to_a_share(inputs: int, results: int, tenant: str, full: str) -> None:
    quotas = Quotas(SETTINGS)
    quotas.upload("u", upload(size=5))
    quotas.upload("u", upload(size=inputs))
    quotas.job("a", job(results=5))
    quotas.stored("a", results - 5)
    quotas.stored("unknown", 99 * MIB)
    for what in BYTES:
        match = f"the {what} of the tenant have .*raise jobs.{what}_max_bytes"
        with allowed(StorageFull if what == full else None, match):
            quotas.check_bytes(tenant, what)
    quotas.upload("u", None)
    quotas.job("a", job(results=7))
    for what in BYTES:
        quotas.check_bytes("acme", what)


def test_what_is_known_of_a_job() -> None:
    quotas = Quotas(SETTINGS)
    for name, read in (("a", "u"), ("b", "v"), ("c", "u"), ("d", "")):
        quotas.job(name, job(upload=read))
    usage = JobUsage("acme", 0, pb.JOB_STATE_RUNNING, (1 << 62, 5000), "u", suspect=False)
    assert quotas.jobs["a"] == quotas.live["a"] == usage
    assert quotas.jobs_using("u") == ["a", "c"]
    assert quotas.jobs_using("w") == []
    assert quotas.jobs_using("") == [], "no upload is none that all read"
    done = job()
    done.job.state = pb.JOB_STATE_COMPLETED
    quotas.job("a", done)
    quotas.job("b", None)
    assert (set(quotas.jobs), set(quotas.live)) == ({"a", "c", "d"}, {"c", "d"})


@pytest.mark.parametrize(("running", "share", "places"), [(10, 0.25, 2), (3, 0.25, 1), (8, 1.0, 8)])
def test_places_of_a_tenant(running: int, share: float, places: int) -> None:
    settings = tuned(JobsSettings, running_max=running, tenant_share=share)
    assert Quotas(settings).places_max == places


async def test_it_is_waited_for_that_all_is_counted() -> None:
    quotas = Quotas(SETTINGS, counted_s=0.0)
    with pytest.raises(TransportUnavailable) as unavailable:
        await quotas.ready()
    assert unavailable.value.retry_after_s == 1.0
    quotas.counted.set()
    await quotas.ready()
