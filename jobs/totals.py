"""Sums over the attempts and stages of a job, for its progress and report."""

from collections import Counter
from typing import Final

from jobs.stages import stage_of
from jobs.store import JobStore
from sluice.internal.v1.job_pb2 import JobCheckpoint, JobRecord
from sluice.v1.jobs_pb2 import JobProgress

_USED: Final = (
    "deduplicated",
    "prompt_tokens",
    "completion_tokens",
    "cached_prompt_tokens",
    "saved_tokens",
    "cost",
)
"""Counts that are summed over all stages."""
_OF_STAGE: Final = (*_USED, "succeeded", "retried", "bad_lines", "output_bytes", "error_bytes")
"""Counts that are summed over the attempts at one stage."""


class Totals:
    """Sums of the stages and attempts before the current one."""

    def __init__(self) -> None:
        self.counts = JobProgress()
        self.reasons: Counter[str] = Counter()
        self.stages: list[JobProgress] = []

    @classmethod
    async def of(cls, store: JobStore, record: JobRecord, stage: int) -> "Totals":
        """Return the sums before the current attempt at a stage, from their logs."""
        totals, job = cls(), record.job.id
        for before in range(stage):  # only what they used counts
            point = (await store.last_segment(job, before, 0))[0].checkpoint
            totals.stages.append(point.counts)
            _sum(totals.counts, point.counts, _USED)
        for attempt in range(record.attempt):
            point = (await store.last_segment(job, stage, attempt))[0].checkpoint
            totals.counts = totals.progress(point.counts, attempt)
            totals.reasons.update(point.dead_by_reason)
        return totals

    def progress(self, counts: JobProgress, attempt: int) -> JobProgress:
        """Return the sums with the counts of an attempt: dead letters that succeed in a retry no longer count.

        Retries add no items: the total is that of the first attempt.
        """
        summed = JobProgress()
        summed.CopyFrom(self.counts)
        _sum(summed, counts, _OF_STAGE)
        if attempt:  # a retried item that succeeds was counted as dead by an earlier attempt
            summed.dead -= counts.succeeded
        else:
            summed.dead, summed.total = counts.dead, counts.total
        return summed

    def dead_by_reason(self, point: JobCheckpoint) -> dict[str, int]:
        """Return the dead letters by reason, with those of the current attempt."""
        reasons = Counter(self.reasons)
        reasons.update(point.dead_by_reason)
        return {reason: count for reason, count in reasons.items() if count > 0}

    def note_stages(self, progress: JobProgress, record: JobRecord) -> None:
        """Set in `progress`, that of the current stage, how far each stage is."""
        spec = record.job.spec
        progress.stage = reached_stage(record)
        if not spec.stages:
            return
        counts = [*self.stages, progress][: stages_of(record)]
        del progress.stages[:]
        for number, of_stage in enumerate(counts):
            name = stage_of(spec, number).name or f"stage {number + 1}"
            progress.stage_name = name
            progress.stages.add(
                name=name, total=of_stage.total, succeeded=of_stage.succeeded, dead=of_stage.dead
            )


def _sum(into: JobProgress, counts: JobProgress, fields: tuple[str, ...]) -> None:
    for name in fields:
        setattr(into, name, getattr(into, name) + getattr(counts, name))


def reached_stage(record: JobRecord) -> int:
    """Return the current stage, or the last one."""
    return min(record.stage, stages_of(record) - 1)


def stages_of(record: JobRecord) -> int:
    """Return how many stages the job has, as far as that is known."""
    return max(1, len(record.job.spec.stages), record.stages)
