"""Which jobs a process may take, and how much each of its jobs may have in flight.

A process that runs a job writes its record once a second, so the record's revision changes. A record that has not
changed for `LEASE_S`, by the clock of whoever looks, is nobody's: no two clocks are compared. What a process that was
only slow still writes is refused, because it names an older revision.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1.jobs_pb2 import (
    JOB_STATE_CANCELLED,
    JOB_STATE_COMPLETED,
    JOB_STATE_EXPIRED,
    JOB_STATE_FAILED,
    JOB_STATE_PAUSED,
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    Job,
    JobItemError,
    JobProgress,
    JobState,
)

BEAT_S: Final = 1.0
"""How often the owner of a job writes its record."""
LEASE_S: Final = 3.0
PROCESSES_LOST: Final = "PROCESSES_LOST"
"""Why a job fails with which processes ended."""
LOST_MAX: Final = 3
"""Processes that may end with a job, one after the other, without an item more; then it fails."""


class Leases:
    """What one process has seen of the jobs of others."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._seen: dict[str, tuple[int, float]] = {}

    def may_take(self, record: JobRecord, revision: int, now: float) -> bool:
        """Whether the job of ``record``, as it is now, is this process's to take."""
        job = record.job
        if job.state == JOB_STATE_QUEUED:
            return True
        if job.state != JOB_STATE_RUNNING:
            self._seen.pop(job.id, None)
            return False
        # A process that was started again under its name has left its jobs behind.
        if job.runner in ("", self._process):
            return True
        seen, since = self._seen.get(job.id, (0, now))
        if seen != revision:
            self._seen[job.id] = seen, since = revision, now
        return now - since >= LEASE_S


OVER: Final = frozenset(
    {JOB_STATE_COMPLETED, JOB_STATE_FAILED, JOB_STATE_CANCELLED, JOB_STATE_EXPIRED}
)
"""States of jobs that are over."""
LIVE: Final = frozenset({JOB_STATE_QUEUED, JOB_STATE_RUNNING, JOB_STATE_PAUSED})
"""The others."""


def set_state(job: Job, state: "JobState.ValueType", code: str, reason: str, now_ms: int) -> None:
    """Move a job to a state, with the reason for programs and for people.

    Args:
        now_ms: when it comes into the state, Unix milliseconds.
    """
    job.state, job.reason_code, job.reason = state, code, reason
    job.state_time.FromMilliseconds(now_ms)
    job.closing = state in OVER and state != JOB_STATE_COMPLETED
    if state in OVER:
        job.end_time.FromMilliseconds(now_ms)
        if job.spec.HasField("results_expire_after"):
            kept_ms = job.spec.results_expire_after.ToMilliseconds()
            job.results_expire_time.FromMilliseconds(now_ms + kept_ms)
    if state != JOB_STATE_RUNNING:
        stand_still(job.progress)


def stand_still(progress: JobProgress) -> None:
    """Clear what is true only of a job that runs: the items in flight and the time left."""
    progress.in_flight = 0
    progress.ClearField("remaining")


def is_ended(job: Job) -> bool:
    """Whether the job is over, and its counts and dead letters are final."""
    return job.state in OVER and not job.closing


def is_still(job: Job) -> bool:
    """Whether no outcome of an item is to come unless somebody resumes or retries the job."""
    return job.state in OVER or job.state == JOB_STATE_PAUSED


def unfinished_error_of(job: Job) -> JobItemError:
    """Return the error of the items of a job that ended early without an outcome."""
    match job.state:
        case JobState.JOB_STATE_CANCELLED:
            return JobItemError(
                code=1, reason="batch_cancelled", message="the job was cancelled before it was done"
            )
        case JobState.JOB_STATE_EXPIRED:
            message = "the deadline of the job passed before it was done"
            return JobItemError(code=4, reason="batch_expired", message=message)
        case _:
            message = f"the job failed before it was done: {job.reason}"
            return JobItemError(code=10, reason=job.reason_code, message=message)


def note_loss(record: JobRecord) -> None:
    """The process that had the job has ended without a word."""
    record.lost_processes = _losses(record) + 1
    record.items_when_lost = _done(record)


def is_suspect(record: JobRecord, *, waits: bool = False) -> bool:
    """Whether the next process that ends with the job is the last one.

    A process runs one such job at a time: a job that was only beside another one that ends processes goes on without
    it. ``waits``: nobody has the job now; if a process is named it was lost.
    """
    return _losses(record) + (waits and bool(record.job.runner)) >= LOST_MAX - 1


def _losses(record: JobRecord) -> int:
    return record.lost_processes if _done(record) == record.items_when_lost else 0


def _done(record: JobRecord) -> int:
    return record.job.progress.succeeded + record.job.progress.dead


def urgency(record: JobRecord) -> tuple[int, int]:
    """Sort key of jobs that wait: earliest deadline first, then in order of creation."""
    job = record.job
    deadline = job.spec.limits.deadline_time
    return deadline.ToMilliseconds() or 1 << 62, job.create_time.ToMilliseconds()


def shares(window: int, tenants: Mapping[str, str]) -> dict[str, int]:
    """How many items each job may have in flight: tenants share ``window`` equally, and so do the jobs of each.

    ``tenants``: of each job. Each gets at least one.
    """
    jobs = Counter(tenants.values())
    return {job: max(1, window // (len(jobs) * jobs[tenant])) for job, tenant in tenants.items()}
