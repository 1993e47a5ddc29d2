"""Reading of results: the log of an attempt in the order of its items, the merge of all attempts, and their sums."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Final

from jobs.core.window import BLOCK, SPAN_MAX
from jobs.store import JobStore
from sluice.internal.v1.job_pb2 import ItemOutcome, JobCheckpoint, JobRecord
from sluice.v1.jobs_pb2 import JobProgress, JobSpec, JobStage

FIRST: Final = 1
"""Lowest sequence that a segment can have: the stream begins with it."""


class OrderedLog:
    """Outcomes of one attempt by position. `read` may be called again: it continues where it was.

    It stops at a position without an outcome, unless gaps are skipped. Later outcomes wait in
    memory, about `SPAN_MAX` of them at most.
    """

    def __init__(self, store: JobStore, job: str, stage: int, attempt: int, first: int = 0) -> None:
        """Create it; `first` is the first position to read."""
        self._store = store
        self._attempt = job, stage, attempt
        self._next_place = first
        self._early: dict[int, ItemOutcome] = {}
        self._sequence = 0

    async def read(self, *, past_gaps: bool = False) -> AsyncIterator[ItemOutcome]:
        """Yield outcomes from the segments that exist.

        Args:
            past_gaps: whether no outcome is still to come, so that positions without one are skipped.
        """
        if not self._sequence:
            self._sequence = await self._start()
        while (entry := await self._store.segment_at(*self._attempt, self._sequence)) is not None:
            segment, sequence = entry
            self._sequence = sequence + 1
            for outcome in segment.outcomes:
                if outcome.position >= self._next_place:
                    self._early[outcome.position] = outcome
            while (outcome := self._early.pop(self._next_place, None)) is not None:  # type: ignore[arg-type]
                self._next_place += 1
                yield outcome
        if past_gaps:
            for position in sorted(self._early):
                self._next_place = position + 1
                yield self._early.pop(position)

    async def unordered(self) -> AsyncIterator[ItemOutcome]:
        """Yield all outcomes in the order in which they were written, one segment in memory at a time."""
        sequence = FIRST
        while (entry := await self._store.segment_at(*self._attempt, sequence)) is not None:
            segment, sequence = entry[0], entry[1] + 1
            for outcome in segment.outcomes:
                yield outcome

    async def _start(self) -> int:
        """Return a sequence at or before the first segment that may have the first position (bisection)."""
        low, last = FIRST, self._next_place - SPAN_MAX - BLOCK
        if last <= 0:
            return low
        high = (await self._store.last_segment(*self._attempt))[1]
        while low < high:
            middle = (low + high) // 2
            entry = await self._store.segment_at(*self._attempt, middle)
            if entry is None or entry[0].checkpoint.low_water > last:
                high = middle
            else:
                low = entry[1] + 1
        return low


@dataclass(slots=True)
class OutcomeReader:
    """Outcomes by index, read as far as the requested indexes, which only grow.

    Attributes:
        head: the first outcome at or after the last requested index; None: there is none, or nothing was requested.
    """

    outcomes: AsyncIterator[ItemOutcome]
    head: ItemOutcome | None = None
    _ended: bool = False

    async def skip_to(self, index: int) -> ItemOutcome | None:
        """Return the first outcome at or after `index`; None: there is none."""
        while not self._ended and (self.head is None or self.head.result.index < index):
            self.head = await anext(self.outcomes, None)
            self._ended = self.head is None
        return self.head

    async def at(self, index: int) -> ItemOutcome | None:
        """Return the outcome of `index`; None: it has none."""
        head = await self.skip_to(index)
        return head if head is not None and head.result.index == index else None


async def merge_attempts(
    store: JobStore, job: str, stage: int, attempts: int, first: int = 0, *, past_gaps: bool = True
) -> AsyncIterator[ItemOutcome]:
    """Yield the outcomes of a stage by index, from `first` on, after this many retries.

    Args:
        store: has the logs.
        job: the job.
        stage: the stage.
        attempts: number of the last attempt.
        first: first index.
        past_gaps: see `OrderedLog.read`; without it, only outcomes before the first missing one.
            Always set after a retry.
    """
    past_gaps = past_gaps or attempts > 0
    async with AsyncExitStack() as stack:
        readers = []
        for attempt in range(attempts + 1):
            log = OrderedLog(store, job, stage, attempt, 0 if attempt else first)
            outcomes = aclosing(log.read(past_gaps=past_gaps))  # type: ignore[type-var]
            readers.append(OutcomeReader(await stack.enter_async_context(outcomes)))
        index = first
        while True:
            heads = [await reader.skip_to(index) for reader in readers]
            if not (there := [head for head in heads if head is not None]):
                return
            # The latest attempt that has the index decides; earlier outcomes are replaced.
            index = min(head.result.index for head in there)
            yield next(head for head in reversed(there) if head.result.index == index)
            index += 1


async def failed(outcomes: AsyncIterator[ItemOutcome]) -> AsyncIterator[ItemOutcome]:
    """Yield the outcomes that are dead letters."""
    async for outcome in outcomes:
        if outcome.result.HasField("error"):
            yield outcome


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


def stage_of(spec: JobSpec, number: int) -> JobStage:
    """Return the specification of a stage; the last one also for its repetitions."""
    return spec.stages[min(number, len(spec.stages) - 1)]
