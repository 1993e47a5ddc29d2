"""What each tenant has in the store of jobs, by the records as they change."""

import pytest

from jobs import quotas
from jobs.quotas import JobUsage, Quotas, UploadUsage
from sluice.errors import LimitReached, StorageFull, TransportUnavailable
from sluice.internal.v1.job_pb2 import JobRecord, UploadRecord
from sluice.settings import JobsSettings
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import timestamp
from tests.support.settings import tuned

MIB = 1024**2
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


def upload(tenant: str = "acme", size: int = 0, complete: int = 7) -> UploadRecord:
    return UploadRecord(tenant=tenant, size_bytes=size, complete_unix_ms=complete)


def test_job_limit_is_per_tenant() -> None:
    found = Quotas(SETTINGS)
    found.check_job("acme")
    for name in ("a", "b", "b"):  # the second record of a job is the same job
        found.job(name, job())
    with pytest.raises(LimitReached, match=r"has 2 jobs; delete ended ones") as refused:
        found.check_job("acme")
    assert refused.value.retry_after_s == 30.0
    assert refused.value.metadata == {
        "subject": "tenant acme",
        "limit": "jobs.tenant_jobs_max",
        "value": "2",
    }
    found.check_job("other")
    assert found.jobs["a"] == JobUsage(
        "acme", 0, pb.JOB_STATE_RUNNING, (1 << 62, 5000), "u", suspect=False
    )
    found.job("a", None)
    found.job("unknown", None)
    found.check_job("acme")
    assert found.known_ids() == ({"b"}, set())
    found.job("b", None)
    assert not found.jobs_by_tenant
    assert not found.result_bytes


def test_so_many_uploads_whole_or_not() -> None:
    found = Quotas(SETTINGS)
    for number in range(4):
        found.check_upload("acme")
        found.upload(f"u{number}", upload(complete=number % 2))
    with pytest.raises(LimitReached, match=r"has 4 uploads; delete unused ones"):
        found.check_upload("acme")
    found.check_upload("other")
    assert found.uploads["u1"] == UploadUsage("acme", 0, 1)
    assert found.uploads["u0"].complete_unix_ms == 0
    found.upload("u3", None)
    found.upload("unknown", None)
    found.check_upload("acme")


def test_bytes_of_inputs_up_to_a_share() -> None:
    found = Quotas(SETTINGS)
    found.upload("u", upload(size=10 * MIB - 1))
    found.check_inputs("acme")
    found.upload("u", upload(size=10 * MIB))
    with pytest.raises(StorageFull, match="the inputs of the tenant have 10485760 bytes"):
        found.check_inputs("acme")
    found.check_inputs("other")
    found.check_results("acme")
    found.upload("v", upload(size=5))
    found.upload("u", None)
    found.check_inputs("acme")
    assert found.input_bytes == {"acme": 5}


def test_result_bytes_are_counted_when_stored_and_recorded() -> None:
    found = Quotas(SETTINGS)
    found.job("a", job(results=10 * MIB))
    found.stored("a", 10 * MIB - 1)
    found.check_results("acme")
    found.stored("a", 1)
    with pytest.raises(StorageFull, match=r"raise jobs\.results_max_bytes"):
        found.check_results("acme")
    found.check_results("other")
    found.check_inputs("acme")
    found.stored("unknown", 5)
    assert found.result_bytes == {"acme": 20 * MIB}
    assert found.jobs["a"].results_bytes == 20 * MIB
    found.job("a", job(results=7))
    assert found.result_bytes == {"acme": 7}
    found.job("a", job("other", results=8))
    assert found.result_bytes == {"other": 8}
    assert found.jobs_by_tenant == {"other": 1}


def test_who_reads_an_upload() -> None:
    found = Quotas(SETTINGS)
    for name, read in (("a", "u"), ("b", "v"), ("c", "u"), ("d", "")):
        found.job(name, job(upload=read))
    assert found.jobs_using("u") == ["a", "c"]
    assert found.jobs_using("w") == []
    assert found.jobs_using("") == [], "no upload is none that all read"


def test_what_is_gone_is_forgotten() -> None:
    found = Quotas(SETTINGS)
    found.job("a", job(results=5))
    found.job("b", job())
    found.upload("u", upload(size=5))
    found.upload("v", upload())
    assert found.known_ids() == ({"a", "b"}, {"u", "v"})
    found.forget(["a"], ["u"])
    assert found.known_ids() == ({"b"}, {"v"})
    assert (found.result_bytes, found.input_bytes) == ({}, {})
    assert (found.jobs_by_tenant, found.uploads_by_tenant) == ({"acme": 1}, {"acme": 1})


@pytest.mark.parametrize(("running", "share", "places"), [(10, 0.25, 2), (3, 0.25, 1), (8, 1.0, 8)])
def test_places_of_a_tenant(running: int, share: float, places: int) -> None:
    settings = tuned(JobsSettings, running_max=running, tenant_share=share)
    assert Quotas(settings).places_max == places


async def test_it_is_waited_for_that_all_is_counted() -> None:
    assert quotas.COUNTED_S == 10.0
    found = Quotas(SETTINGS, counted_s=0.0)
    with pytest.raises(TransportUnavailable) as unavailable:
        await found.ready()
    assert unavailable.value.retry_after_s == 1.0
    found.counted.set()
    await found.ready()
