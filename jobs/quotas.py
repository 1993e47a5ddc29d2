"""What each tenant has in the store, and how much it may have: jobs, uploads, bytes of inputs, bytes of results.

Every process counts for itself, by the records that it hears of as they change; all of them are read now and then. So a
tenant may be a moment over its share, by what several processes take at the same time.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from sluice.errors import LimitReached, StorageFull
from sluice.internal.v1.job_pb2 import JobRecord, UploadRecord
from sluice.settings import JobsSettings

RETRY_AFTER_S: Final = 30.0


class Quotas:
    """Of all tenants, as one process knows it."""

    def __init__(self, settings: JobsSettings) -> None:
        self._settings = settings
        self._jobs: dict[str, tuple[str, int]] = {}
        """Tenant and bytes of results, by job."""
        self._uploads: dict[str, tuple[str, int]] = {}
        self._jobs_of: Counter[str] = Counter()
        self._uploads_of: Counter[str] = Counter()
        self._inputs: Counter[str] = Counter()
        self._results: Counter[str] = Counter()

    @property
    def places_max(self) -> int:
        """Jobs of one tenant that a process runs at the same time."""
        settings = self._settings
        return max(1, int(settings.running_max * settings.tenant_share))

    def job(self, job: str, record: JobRecord | None) -> None:
        """The job as it is now; None: it is gone."""
        tenant, size = self._jobs.pop(job, ("", 0))
        if tenant:
            _add(self._jobs_of, tenant, -1)
            _add(self._results, tenant, -size)
        if record is not None:
            tenant, size = record.job.tenant, record.results_bytes
            self._jobs[job] = tenant, size
            _add(self._jobs_of, tenant, 1)
            _add(self._results, tenant, size)

    def stored(self, job: str, size: int) -> None:
        """So many bytes of results more; the record tells it later."""
        tenant, before = self._jobs.get(job, ("", 0))
        if tenant:
            self._jobs[job] = tenant, before + size
            _add(self._results, tenant, size)

    def upload(self, upload: str, record: UploadRecord | None) -> None:
        """The upload as it is now, complete or not; None: it is gone."""
        tenant, size = self._uploads.pop(upload, ("", 0))
        if tenant:
            _add(self._uploads_of, tenant, -1)
            _add(self._inputs, tenant, -size)
        if record is not None:
            self._uploads[upload] = record.tenant, record.size_bytes
            _add(self._uploads_of, record.tenant, 1)
            _add(self._inputs, record.tenant, record.size_bytes)

    def known(self) -> tuple[set[str], set[str]]:
        """Jobs and uploads that were heard of."""
        return set(self._jobs), set(self._uploads)

    def forget(self, jobs: Iterable[str], uploads: Iterable[str]) -> None:
        """These are gone."""
        for job in jobs:
            self.job(job, None)
        for upload in uploads:
            self.upload(upload, None)

    def check_job(self, tenant: str) -> None:
        """Raises LimitReached when ``tenant`` has as many jobs as it may have."""
        most = self._settings.tenant_jobs_max
        self._check_count(tenant, self._jobs_of[tenant], most, "jobs", "those that are over")

    def check_upload(self, tenant: str) -> None:
        """Raises LimitReached when ``tenant`` has as many uploads as it may have."""
        most = 2 * self._settings.tenant_jobs_max
        which = "those that no job needs"
        self._check_count(tenant, self._uploads_of[tenant], most, "uploads", which)

    def _check_count(self, tenant: str, count: int, most: int, what: str, which: str) -> None:
        if count >= most:
            raise LimitReached(
                f"the tenant has {most} {what}: delete {which}, or raise jobs.tenant_jobs_max",
                retry_after_s=RETRY_AFTER_S,
                metadata={
                    "subject": f"tenant {tenant}",
                    "limit": "jobs.tenant_jobs_max",
                    "value": str(most),
                },
            )

    def check_inputs(self, tenant: str) -> None:
        """Raises StorageFull when ``tenant`` has its share of the inputs."""
        self._check(self._inputs[tenant], self._settings.inputs_max_bytes, "inputs")

    def check_results(self, tenant: str) -> None:
        """Raises StorageFull when ``tenant`` has its share of the results."""
        self._check(self._results[tenant], self._settings.results_max_bytes, "results")

    def _check(self, size: int, whole: int, what: str) -> None:
        share = self._settings.tenant_share
        if size >= share * whole:
            raise StorageFull(
                f"the {what} of your tenant have {size} bytes, its share of the store of jobs: delete jobs that are "
                f"over, or raise jobs.{what}_max_bytes or jobs.tenant_share"
            )


def _add(counter: Counter[str], name: str, count: int) -> None:
    counter[name] += count
    if not counter[name]:
        del counter[name]
