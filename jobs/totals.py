"""Sums over the attempts and stages of a job, for its progress and report."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from jobs.stages import stage_of
from jobs.store import JobStore
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1.jobs_pb2 import JobProgress


class Totals:
    """Sums of the stages and attempts before the current one."""

    def __init__(self) -> None:
        self.total = 0
        self.counts = JobProgress()
        self.reasons: Counter[str] = Counter()
        self.stages: list[JobProgress] = []

    def add_stage(self, counts: JobProgress) -> None:
        """Add the counts of an earlier stage: only its usage counts."""
        self.stages.append(counts)
        _sum(self.counts, counts, _USED)

    def add(self, counts: JobProgress, reasons: Counter[str], *, attempt: int) -> None:
        """Add counts and dead letters by reason of an attempt at the current stage."""
        self.total += 0 if attempt else counts.total
        self.counts = self.progress(counts, attempt)
        self.reasons.update(reasons)

    def progress(self, counts: JobProgress, attempt: int) -> JobProgress:
        """Return the sums with the counts of an attempt: dead letters that succeed in a retry no longer count."""
        summed = JobProgress()
        summed.CopyFrom(self.counts)
        _sum(summed, counts, _OF_STAGE)
        # A retried item that succeeds was counted as dead by an earlier attempt.
        summed.dead += -counts.succeeded if attempt else counts.dead
        return summed


_USED: Final = (
    "deduplicated",
    "prompt_tokens",
    "completion_tokens",
    "cached_prompt_tokens",
    "saved_tokens",
    "cost",
)
_OF_STAGE: Final = (*_USED, "succeeded", "retried", "bad_lines", "output_bytes", "error_bytes")


def _sum(into: JobProgress, counts: JobProgress, fields: Iterable[str]) -> None:
    for name in fields:
        setattr(into, name, getattr(into, name) + getattr(counts, name))


async def totals_of(store: JobStore, record: JobRecord, stage: int) -> Totals:
    """Return the sums of the stages and attempts before the current one, from their logs."""
    totals = Totals()
    for before in range(stage):
        totals.add_stage((await store.last_segment(record.job.id, before, 0))[0].checkpoint.counts)
    for attempt in range(record.attempt):
        point = (await store.last_segment(record.job.id, stage, attempt))[0].checkpoint
        totals.add(point.counts, Counter(point.dead_by_reason), attempt=attempt)
    return totals


def note_stages(progress: JobProgress, earlier: Totals, record: JobRecord) -> None:
    """Set in `progress`, that of the current stage, how far each stage is."""
    spec = record.job.spec
    progress.stage = reached_stage(record)
    if not spec.stages:
        return
    counts = [*earlier.stages, progress][: stages_of(record)]
    del progress.stages[:]
    for number, counts_of_stage in enumerate(counts):
        name = stage_of(spec, number).name or f"stage {number + 1}"
        progress.stage_name = name
        progress.stages.add(
            name=name,
            total=counts_of_stage.total,
            succeeded=counts_of_stage.succeeded,
            dead=counts_of_stage.dead,
        )


def reached_stage(record: JobRecord) -> int:
    """Return the current stage, or the last one."""
    return min(record.stage, stages_of(record) - 1)


def stages_of(record: JobRecord) -> int:
    """Return how many stages the job has, as far as that is known."""
    return max(1, len(record.job.spec.stages), record.stages)
