"""What each tenant has in the store, and how much it may have: jobs, uploads, bytes of inputs, bytes of results.

It is an index of the records too: a call about jobs of one tenant reads those of no other.

Every process counts for itself, by the records that it hears of as they change; all of them are read now and then. So a
tenant may be a moment over its share, by what several processes take at the same time.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from jobs.core.leases import LIVE, is_suspect, urgency
from sluice.errors import LimitReached, StorageFull, TransportUnavailable
from sluice.internal.v1.job_pb2 import JobRecord, UploadRecord
from sluice.settings import JobsSettings
from sluice.v1.jobs_pb2 import JobState

COUNTED_S: Final = 10.0
RETRY_AFTER_S: Final = 30.0


@dataclass(slots=True)
class KnownJob:
    """What is known of a job.

    Attributes:
        urgency: deadline, or what is later than any, and creation, Unix milliseconds: the smallest is taken first.
        suspect: whether the next process that ends with it is the last one.
    """

    tenant: str
    results_bytes: int
    state: "JobState.ValueType"
    urgency: tuple[int, int]
    upload: str
    suspect: bool


@dataclass(frozen=True, slots=True)
class KnownUpload:
    """What is known of an upload; ``complete_unix_ms`` is 0 while it is not complete."""

    tenant: str
    size_bytes: int
    complete_unix_ms: int


class Quotas:
    """The use of all tenants, as one process knows it.

    Attributes:
        jobs: by id.
        live: those of them that wait, run or are paused.
        uploads: by id.
        counted: set when all records were read once.
    """

    def __init__(self, settings: JobsSettings) -> None:
        self._settings = settings
        self.jobs: dict[str, KnownJob] = {}
        self.live: dict[str, KnownJob] = {}
        self.uploads: dict[str, KnownUpload] = {}
        self.counted = asyncio.Event()
        self._jobs_of: Counter[str] = Counter()
        self._uploads_of: Counter[str] = Counter()
        self._inputs: Counter[str] = Counter()
        self._results: Counter[str] = Counter()

    @property
    def places_max(self) -> int:
        """Jobs of one tenant that a process runs at the same time."""
        settings = self._settings
        return max(1, int(settings.running_max * settings.tenant_share))

    async def ready(self) -> None:
        """Returns when all is counted.

        Raises:
            TransportUnavailable: it takes too long.
        """
        try:
            async with asyncio.timeout(COUNTED_S):
                await self.counted.wait()
        except TimeoutError:
            message = "this process of jobs has not read the records yet"
            raise TransportUnavailable(message, retry_after_s=1.0) from None

    def job(self, job: str, record: JobRecord | None) -> None:
        """The job as it is now; None: it is gone."""
        known = self.jobs.pop(job, None)
        self.live.pop(job, None)
        if known is not None:
            _add(self._jobs_of, known.tenant, -1)
            _add(self._results, known.tenant, -known.results_bytes)
        if record is not None:
            shown = record.job
            known = self.jobs[job] = KnownJob(
                *(shown.tenant, record.results_bytes, shown.state),
                *(urgency(record), record.upload_id, is_suspect(record, waits=True)),
            )
            if shown.state in LIVE:
                self.live[job] = known
            _add(self._jobs_of, shown.tenant, 1)
            _add(self._results, shown.tenant, record.results_bytes)

    def stored(self, job: str, size: int) -> None:
        """So many bytes of results more; the record tells it later."""
        known = self.jobs.get(job)
        if known is not None:
            known.results_bytes += size
            _add(self._results, known.tenant, size)

    def upload(self, upload: str, record: UploadRecord | None) -> None:
        """The upload as it is now, complete or not; None: it is gone."""
        known = self.uploads.pop(upload, None)
        if known is not None:
            _add(self._uploads_of, known.tenant, -1)
            _add(self._inputs, known.tenant, -known.size_bytes)
        if record is not None:
            self.uploads[upload] = KnownUpload(
                record.tenant, record.size_bytes, record.complete_unix_ms
            )
            _add(self._uploads_of, record.tenant, 1)
            _add(self._inputs, record.tenant, record.size_bytes)

    def totals(self, tenant: str | None = None) -> Counter["JobState.ValueType"]:
        """Return how many jobs are in each state, of ``tenant`` or of all."""
        known = list(self.jobs.values())  # metrics are read on other threads
        return Counter(job.state for job in known if tenant in (None, job.tenant))

    def users_of(self, upload: str) -> list[str]:
        """Jobs whose input is ``upload``."""
        return [job for job, known in self.jobs.items() if known.upload == upload] if upload else []

    def known(self) -> tuple[set[str], set[str]]:
        """Jobs and uploads that were heard of."""
        return set(self.jobs), set(self.uploads)

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
