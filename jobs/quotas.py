"""Quotas: what each tenant has in the store, and how much it may have.

Counted are jobs, uploads, bytes of inputs and bytes of results. It is also an index of the records,
so that a call about the jobs of one tenant reads no others.

Every process counts for itself, from the records that it sees change, and scans all of them now and
then. So a tenant may briefly exceed its share by what several processes accept at the same time.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from jobs.core.leases import LIVE, is_suspect, urgency
from sluice.errors import LimitReached, StorageFull, TransportUnavailable
from sluice.internal.v1.job_pb2 import JobRecord, UploadRecord
from sluice.settings import JobsSettings
from sluice.v1.jobs_pb2 import JobState

COUNTED_S: Final = 10.0
"""How long a call waits for the first scan, in seconds."""
RETRY_AFTER_S: Final = 30.0
"""Retry delay in the error of a tenant at its limit, in seconds."""


@dataclass(slots=True)
class JobUsage:
    """A job, as far as quotas and scheduling need it.

    Attributes:
        size_bytes: of its results.
        urgency: deadline (or a time later than any) and creation, in Unix milliseconds; the smallest is
            claimed first.
        suspect: see `leases.is_suspect`.
    """

    tenant: str
    size_bytes: int
    state: "JobState.ValueType"
    urgency: tuple[int, int]
    upload: str
    suspect: bool


_Usages = Mapping[str, JobUsage] | Mapping[str, UploadRecord]


class Quotas:
    """Usage of all tenants, as one process knows it.

    Attributes:
        jobs: by id.
        live: jobs that wait, run or are paused.
        uploads: by id.
        counted: set once all records were scanned.
    """

    def __init__(self, settings: JobsSettings, counted_s: float = COUNTED_S) -> None:
        self._settings = settings
        self._counted_s = counted_s
        self.jobs: dict[str, JobUsage] = {}
        self.live: dict[str, JobUsage] = {}
        self.uploads: dict[str, UploadRecord] = {}
        self.counted = asyncio.Event()

    @property
    def places_max(self) -> int:
        """Jobs of one tenant that a process runs at the same time."""
        settings = self._settings
        return max(1, int(settings.running_max * settings.tenant_share))

    async def ready(self) -> None:
        """Wait until all records were scanned.

        Raises:
            TransportUnavailable: that takes too long.
        """
        try:
            async with asyncio.timeout(self._counted_s):
                await self.counted.wait()
        except TimeoutError:
            message = "this jobs process has not read the job records yet"
            raise TransportUnavailable(message) from None

    def job(self, job: str, record: JobRecord | None) -> None:
        """Update a job; None: it is gone."""
        self.jobs.pop(job, None)
        self.live.pop(job, None)
        if record is not None:
            usage = self.jobs[job] = JobUsage(
                tenant=record.job.tenant,
                size_bytes=record.results_bytes,
                state=record.job.state,
                urgency=urgency(record),
                upload=record.upload_id,
                suspect=is_suspect(record, waits=True),
            )
            if usage.state in LIVE:
                self.live[job] = usage

    def stored(self, job: str, size: int) -> None:
        """Add bytes of results, which the record has later."""
        if job in self.jobs:
            self.jobs[job].size_bytes += size

    def upload(self, upload: str, record: UploadRecord | None) -> None:
        """Update an upload, complete or not; None: it is gone."""
        self.uploads.pop(upload, None)
        if record is not None:
            self.uploads[upload] = record

    def totals(self, tenant: str | None = None) -> Counter["JobState.ValueType"]:
        """Return how many jobs are in each state, of one tenant or of all."""
        jobs = list(self.jobs.values())  # metrics are read on other threads
        return Counter(job.state for job in jobs if tenant in (None, job.tenant))

    def jobs_using(self, upload: str) -> list[str]:
        """Return the jobs whose input is an upload."""
        return [job for job, usage in self.jobs.items() if usage.upload == upload] if upload else []

    def check_count(self, tenant: str, what: Literal["jobs", "uploads"]) -> None:
        """Raise LimitReached if a tenant has as many jobs or uploads as it may have."""
        setting, limit = "jobs.tenant_jobs_max", self._settings.tenant_jobs_max
        usages: _Usages = self.jobs
        if what == "uploads":
            usages, limit = self.uploads, 2 * limit
        if len(_of_tenant(tenant, usages)) >= limit:
            raise LimitReached(
                f"the tenant has {limit} {what}; delete unused ones, or raise {setting}",
                retry_after_s=RETRY_AFTER_S,
                metadata={"subject": f"tenant {tenant}", "limit": setting, "value": str(limit)},
            )

    def check_bytes(self, tenant: str, what: Literal["inputs", "results"]) -> None:
        """Raise StorageFull if a tenant has used its share of the inputs or results."""
        usages: _Usages = self.jobs
        whole = self._settings.results_max_bytes
        if what == "inputs":
            usages, whole = self.uploads, self._settings.inputs_max_bytes
        size = sum(_of_tenant(tenant, usages))
        if size >= self._settings.tenant_share * whole:
            raise StorageFull(
                f"the {what} of the tenant have {size} bytes, its share of the jobs store; delete "
                f"ended jobs, or raise jobs.{what}_max_bytes or jobs.tenant_share"
            )


def _of_tenant(tenant: str, usages: _Usages) -> list[int]:
    """Return the sizes of what a tenant has, in bytes."""
    return [usage.size_bytes for usage in usages.values() if usage.tenant == tenant]
