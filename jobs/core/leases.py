"""Leases: which jobs a process may claim, and how much each of its jobs may have in flight.

The owner of a job writes its record once a second, which changes the record's revision. A record
that has not changed for `LEASE_S`, by the clock of whoever looks, has no owner: no two clocks are
compared. What a slow owner writes later is refused, because it names an older revision.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1 import jobs_pb2 as pb

HEARTBEAT_S: Final = 1.0
"""How often the owner of a job writes its record, in seconds."""
LEASE_S: Final = 3.0
"""Age of an unchanged record after which its job may be claimed, in seconds."""
PROCESSES_LOST: Final = "PROCESSES_LOST"
"""Reason code of a job that fails because processes ended with it."""
LOST_MAX: Final = 3
"""Processes in a row that may end with a job, without another finished item, before it fails."""


class Leases:
    """What one process has observed of the jobs of others."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._seen: dict[str, tuple[int, float]] = {}

    def may_claim(self, record: JobRecord, revision: int, now: float) -> bool:
        """Return whether this process may claim the job of a record.

        For a job of another process it remembers the revision: only a later call can find it unchanged for `LEASE_S`.
        """
        job = record.job
        if job.state == pb.JOB_STATE_QUEUED:
            return True
        if job.state != pb.JOB_STATE_RUNNING:
            self._seen.pop(job.id, None)
            return False
        # A process that restarted under its name finds jobs of its former self.
        if job.runner in ("", self._process):
            return True
        seen, since = self._seen.get(job.id, (0, now))
        if seen != revision:
            self._seen[job.id] = seen, since = revision, now
        return now - since >= LEASE_S


OVER: Final = frozenset(
    {pb.JOB_STATE_COMPLETED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED, pb.JOB_STATE_EXPIRED}
)
"""States of jobs that have ended."""
LIVE: Final = frozenset({pb.JOB_STATE_QUEUED, pb.JOB_STATE_RUNNING, pb.JOB_STATE_PAUSED})
"""States of jobs that have not ended."""


def set_state(
    job: pb.Job, state: "pb.JobState.ValueType", code: str, reason: str, now_ms: int
) -> None:
    """Move a job to a state, with a reason for programs and one for people.

    Also set what follows from it: times and `closing`; a queued job has no runner, only a running one items in flight.

    Args:
        job: is changed.
        state: the new state.
        code: the reason for programs.
        reason: the reason for people.
        now_ms: when it enters the state, in Unix milliseconds.
    """
    job.state, job.reason_code, job.reason = state, code, reason
    job.state_time.FromMilliseconds(now_ms)
    job.closing = state in OVER and state != pb.JOB_STATE_COMPLETED
    if state in OVER:
        job.end_time.FromMilliseconds(now_ms)
        if job.spec.HasField("results_expire_after"):
            kept_ms = job.spec.results_expire_after.ToMilliseconds()
            job.results_expire_time.FromMilliseconds(now_ms + kept_ms)
    if state == pb.JOB_STATE_QUEUED:
        job.runner = ""
    if state != pb.JOB_STATE_RUNNING:
        clear_progress(job.progress)


def clear_progress(progress: pb.JobProgress) -> None:
    """Clear what only applies to a running job: items in flight and time left."""
    progress.in_flight = 0
    progress.ClearField("remaining")


def is_ended(job: pb.Job) -> bool:
    """Return whether a job has ended, and its counts and dead letters are final."""
    return job.state in OVER and not job.closing


def is_idle(job: pb.Job) -> bool:
    """Return whether a job is paused or over; its last owner may still write outcomes for a few seconds."""
    return job.state in OVER or job.state == pb.JOB_STATE_PAUSED


_UNFINISHED: Final = {
    pb.JOB_STATE_CANCELLED: (1, "batch_cancelled", "the job was cancelled before it was done"),
    pb.JOB_STATE_EXPIRED: (4, "batch_expired", "the deadline of the job passed before it was done"),
}


def unfinished_error_of(job: pb.Job) -> pb.JobItemError:
    """Return the error of the unfinished items of a job that ended early."""
    failed = (10, job.reason_code, f"the job failed before it was done: {job.reason}")
    code, reason, message = _UNFINISHED.get(job.state, failed)
    return pb.JobItemError(code=code, reason=reason, message=message)


def record_loss(record: JobRecord) -> None:
    """Record that the owner of the job ended without leaving it."""
    record.lost_processes = _losses(record) + 1
    record.items_when_lost = _done(record)


def is_suspect(record: JobRecord, *, waits: bool = False) -> bool:
    """Return whether the job fails if one more process ends with it.

    A process runs one such job at a time, so that a job that only ran beside it is not blamed.

    Args:
        record: the job.
        waits: whether nobody runs the job now, so that an owner in its record was lost.
    """
    return _losses(record) + (waits and bool(record.job.runner)) >= LOST_MAX - 1


def _losses(record: JobRecord) -> int:
    return record.lost_processes if _done(record) == record.items_when_lost else 0


def _done(record: JobRecord) -> int:
    return record.job.progress.succeeded + record.job.progress.dead


def urgency(record: JobRecord) -> tuple[int, int]:
    """Return the sort key of a waiting job: earliest deadline first, then in order of creation."""
    job = record.job
    deadline = job.spec.limits.deadline_time
    return deadline.ToMilliseconds() or 1 << 62, job.create_time.ToMilliseconds()


def shares(window: int, tenants: Mapping[str, str]) -> dict[str, int]:
    """Return how many items each job may have in flight, at least one.

    Tenants share `window` equally, and so do the jobs of each tenant. `tenants` has the tenant of
    each job.
    """
    jobs = Counter(tenants.values())
    return {job: max(1, window // (len(jobs) * jobs[tenant])) for job, tenant in tenants.items()}
