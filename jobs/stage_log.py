"""Log of an attempt at a stage while one process writes it: segments of outcomes with a checkpoint each.

A segment is accepted only behind the last one, so whoever continues from the log knows exactly
which items have an outcome. Nothing else is needed to continue.
"""

import asyncio
from typing import Final

from jobs.core.window import DoneIndexes
from jobs.process import JobProcess
from jobs.store import RETRY_AFTER_S, SEGMENT_BYTES_MAX, Fenced
from sluice.client.openai_lines import encoded_line
from sluice.errors import TransportUnavailable
from sluice.internal.v1.job_pb2 import ItemOutcome, JobCheckpoint, JobRecord, JobSegment
from sluice.v1 import jobs_pb2 as pb

SEGMENT_ITEMS: Final = 256
"""Most outcomes of a segment."""
BAD_LINES: Final = frozenset({"BAD_LINE", "DUPLICATE_ID"})
"""Reasons of dead letters that are no items."""


class StageLog:
    """Log of one attempt.

    Attributes:
        key: job, stage and attempt.
        done: positions of the outcomes that were written, or are being written.
        checkpoint: state behind the outcomes in `done`; `dead_by_reason` counts what a retry has
            solved as less than zero.
        written: counts of the written outcomes.
        written_bytes: bytes of this process's segments.
        earlier: why an item was a dead letter before, and the length of its line, by position.
        sequence: sequence of its last segment.
        waiting: outcomes that are not written yet.
        waiting_bytes: their size.
    """

    def __init__(self, process: JobProcess, record: JobRecord, stage: int) -> None:
        self._process = process
        self._epoch = record.epoch
        self.key = record.job.id, stage, record.attempt
        self.done = DoneIndexes()
        self.checkpoint = JobCheckpoint()
        self.written = pb.JobProgress()
        self.written_bytes = self.waiting_bytes = self.sequence = 0
        self.earlier: dict[int, tuple[str, int]] = {}
        self.waiting: list[ItemOutcome] = []
        self._appending: asyncio.Future[None] | None = None

    async def load(self) -> None:
        """Continue from the log, and keep its former writer from writing on.

        Raises:
            TransportUnavailable: JetStream does not respond.
            StorageFull: JetStream is full.
            Fenced: another process wrote meanwhile.
        """
        segment, self.sequence = await self._process.store.last_segment(*self.key)
        self.checkpoint = point = segment.checkpoint
        self.done = DoneIndexes(point.low_water, point.done)
        self.written.CopyFrom(point.counts)
        # An empty segment fences the former writer: its next one no longer follows the last.
        if not point.complete:
            await self.append([], at_end=False)

    def add(self, outcome: ItemOutcome) -> None:
        """Add an outcome that waits to be written."""
        self.waiting.append(outcome)
        self.waiting_bytes += outcome.ByteSize()

    @property
    def has_segment(self) -> bool:
        """Whether enough waits for a segment."""
        return len(self.waiting) >= SEGMENT_ITEMS or self.waiting_bytes >= SEGMENT_BYTES_MAX

    def take(self) -> list[ItemOutcome]:
        """Take what waits, as much as a segment holds; return it sorted by position."""
        size = count = 0
        while count < min(SEGMENT_ITEMS, len(self.waiting)) and size < SEGMENT_BYTES_MAX:
            size += self.waiting[count].ByteSize()
            count += 1
        segment, self.waiting = self.waiting[:count], self.waiting[count:]
        self.waiting_bytes -= size
        return sorted(segment, key=lambda outcome: outcome.position)

    async def append(self, outcomes: list[ItemOutcome], *, at_end: bool) -> None:
        """Write the next segment, however long JetStream takes; after a cancel, `flush` waits for it.

        Args:
            outcomes: of the segment.
            at_end: whether no outcome comes after those that wait.

        Raises:
            Fenced: another process wrote meanwhile.
            StorageFull: JetStream is full.
        """
        point = self.checkpoint
        self.done.add(outcome.position for outcome in outcomes)
        for outcome in outcomes:
            self.count(outcome)
            if not outcome.carried:
                self._process.items[_what_became(outcome.result),] += 1
        # The last segment: the input is read and nothing waits.
        point.complete = at_end and not self.waiting
        assert self.done.is_whole or not point.complete, "no place is left out"
        point.low_water, point.done[:] = self.done.low_water, self.done.ranges
        # Shielded: a cancel must not leave open whether the segment was stored.
        self._appending = asyncio.ensure_future(self._append(outcomes))
        await asyncio.shield(self._appending)

    async def close(self, error: pb.JobItemError | None) -> None:
        """Write the last segment of an attempt that ended early, whose unfinished items are counted.

        Args:
            error: error of the unfinished items, except for bad lines; None: the items are unknown.

        Raises:
            Fenced: another process wrote meanwhile.
            StorageFull: JetStream is full.
        """
        if error is not None:
            self.checkpoint.unfinished.CopyFrom(error)
        self.checkpoint.complete = True
        await self._append([])

    async def _append(self, outcomes: list[ItemOutcome]) -> None:
        store, point = self._process.store, self.checkpoint
        point.writer, point.epoch = self._process.name, self._epoch
        segment = JobSegment(outcomes=outcomes, checkpoint=point)
        while True:
            try:
                self.sequence = await store.append(*self.key, segment, self.sequence)
                break
            # JetStream is away: nothing is lost, the same segment is tried again.
            except TransportUnavailable:
                await asyncio.sleep(RETRY_AFTER_S / 2)
            except Fenced:
                # Either another process has the job, or an earlier try of this write was stored
                # and only its response was lost: then the last segment is this one.
                last, sequence = await store.last_segment(*self.key)
                if last != segment:
                    raise
                self.sequence = sequence
                break
        self.written.CopyFrom(segment.checkpoint.counts)
        self.written_bytes += segment.ByteSize()
        self._process.quotas.stored(self.key[0], segment.ByteSize())

    def count(self, outcome: ItemOutcome) -> None:
        """Add an outcome to the counts of the checkpoint."""
        point, result = self.checkpoint, outcome.result
        counts, size = point.counts, len(encoded_line(self.key[0], result))
        counts.total += 1
        point.split_documents += result.parts > 1 and result.part == 0
        # A retried dead letter no longer counts under its earlier reason, whatever became of it.
        if (earlier := self.earlier.pop(outcome.position, None)) is not None:
            point.dead_by_reason[earlier[0]] -= 1
            counts.error_bytes -= earlier[1]
        if result.HasField("error"):
            counts.dead += 1
            counts.error_bytes += size
            counts.bad_lines += result.error.reason in BAD_LINES
            point.dead_by_reason[result.error.reason] += 1
            return
        answer, usage = result.answer, result.answer.usage
        counts.succeeded += 1
        counts.output_bytes += size
        if outcome.carried:  # computed and counted in an earlier stage
            return
        counts.retried += result.attempts > 1
        # A shared answer cost nothing; count what it saved.
        if answer.deduplicated:
            counts.deduplicated += 1
            counts.saved_tokens += usage.prompt_tokens + usage.completion_tokens
        else:
            counts.prompt_tokens += usage.prompt_tokens
            counts.completion_tokens += usage.completion_tokens
            counts.cached_prompt_tokens += usage.cached_prompt_tokens
            counts.cost += answer.cost

    async def flush(self, *, at_end: bool) -> None:
        """Write what waits, after `append` was cancelled; raise what the last write did."""
        if self._appending is not None:
            await self._appending
        while self.waiting:
            await self.append(self.take(), at_end=at_end)


def _what_became(result: pb.JobResult) -> str:
    """Return the outcome as a word for metrics."""
    if result.HasField("error"):
        return "dead"
    return "deduplicated" if result.answer.deduplicated else "succeeded"
