"""Sums over the passes of a job: what its progress and its report say."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from jobs.stages import stage_of
from jobs.store import JobStore
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1.jobs_pb2 import JobProgress


class Totals:
    """Sums of the passes before the one at work."""

    def __init__(self) -> None:
        self.total = 0
        self.counts = JobProgress()
        self.reasons: Counter[str] = Counter()
        self.stages: list[JobProgress] = []

    def add_stage(self, counts: JobProgress) -> None:
        """Add ``counts`` of an earlier stage: only what it used counts."""
        self.stages.append(counts)
        _sum(self.counts, counts, _USED)

    def add(self, counts: JobProgress, reasons: Counter[str], *, round_: int) -> None:
        """Add ``counts`` and dead letters by reason of a round of the stage at work."""
        self.total += 0 if round_ else counts.total
        self.counts = self.progress(counts, round_)
        self.reasons.update(reasons)

    def progress(self, counts: JobProgress, round_: int) -> JobProgress:
        """Return the sums with ``counts`` of the next round: dead letters that succeed in it are dead no more."""
        summed = JobProgress()
        summed.CopyFrom(self.counts)
        _sum(summed, counts, _OF_STAGE)
        summed.dead += -counts.succeeded if round_ else counts.dead
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
    """Read the sums of the passes before the one at work from their logs."""
    totals = Totals()
    for before in range(stage):
        totals.add_stage((await store.last_segment(record.job.id, before, 0))[0].checkpoint.counts)
    for round_ in range(record.round):
        point = (await store.last_segment(record.job.id, stage, round_))[0].checkpoint
        totals.add(point.counts, Counter(point.dead_by_reason), round_=round_)
    return totals


def note_stages(progress: JobProgress, earlier: Totals, record: JobRecord) -> None:
    """Say in ``progress``, that of the stage at work, how far each stage is."""
    spec = record.job.spec
    progress.stage = reached_stage(record)
    if not spec.stages:
        return
    counts = [*earlier.stages, progress][: stages_of(record)]
    del progress.stages[:]
    for number, one in enumerate(counts):
        name = stage_of(spec, number).name or f"stage {number + 1}"
        progress.stage_name = name
        progress.stages.add(name=name, total=one.total, succeeded=one.succeeded, dead=one.dead)


def reached_stage(record: JobRecord) -> int:
    """Return the stage at work, or the last one."""
    return min(record.stage, stages_of(record) - 1)


def stages_of(record: JobRecord) -> int:
    """Return how many stages the job has, as far as it is known."""
    return max(1, len(record.job.spec.stages), record.stages)
