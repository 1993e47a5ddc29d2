"""Log of an attempt at a stage while one process writes it: segments of outcomes with a checkpoint each.

A segment is accepted only behind the last one, so whoever continues from the log knows exactly
which items have an outcome. Nothing else is needed to continue.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from jobs.core.window import DoneIndexes
from jobs.process import JobProcess
from jobs.store import RETRY_AFTER_S, SEGMENT_BYTES_MAX, Fenced
from sluice.client.openai_lines import encoded_line
from sluice.errors import TransportUnavailable
from sluice.internal.v1.job_pb2 import ItemOutcome, JobCheckpoint, JobRecord, JobSegment
from sluice.v1 import jobs_pb2 as pb

SEGMENT_ITEMS: Final = 256
"""Outcomes of a segment."""
BAD_LINES: Final = frozenset({"BAD_LINE", "DUPLICATE_ID"})
"""Reasons of dead letters that are no items."""


class StageLog:
    """Log of one attempt.

    Attributes:
        key: job, stage and attempt.
        done: positions that have an outcome in it.
        counts: of all outcomes, written or not.
        written: of the written outcomes.
        written_bytes: bytes of this process's segments.
        reasons: dead letters of the attempt by reason, less those of earlier attempts that ended otherwise.
        earlier_reasons: why an item was a dead letter before, by position.
        earlier_bytes: length of the line of that dead letter, by position.
        split_documents: documents with more than one item.
        complete: whether every item has its outcome.
        sequence: sequence of its last segment.
        waiting: outcomes that are not written yet.
        waiting_bytes: their size.
    """

    def __init__(self, process: JobProcess, record: JobRecord, stage: int) -> None:
        self._process = process
        self._epoch = record.epoch
        self.key = record.job.id, stage, record.attempt
        self.done = DoneIndexes()
        self.counts = pb.JobProgress()
        self.written = pb.JobProgress()
        self.written_bytes = 0
        self.reasons: Counter[str] = Counter()
        self.earlier_reasons: dict[int, str] = {}
        self.earlier_bytes: dict[int, int] = {}
        self.split_documents = 0
        self.complete = False
        self.waiting: list[ItemOutcome] = []
        self.waiting_bytes = 0
        self._unfinished: pb.JobItemError | None = None
        self.sequence = 0
        self._appending: asyncio.Future[None] | None = None

    async def load(self) -> None:
        """Continue from the log, and keep its former writer from writing on.

        Raises:
            TransportUnavailable: JetStream does not respond.
            StorageFull: JetStream is full.
            Fenced: another process wrote meanwhile.
        """
        segment, self.sequence = await self._process.store.last_segment(*self.key)
        point = segment.checkpoint
        self.done = DoneIndexes(point.low_water, point.done)
        self.counts.CopyFrom(point.counts)
        self.written.CopyFrom(point.counts)
        self.reasons = Counter(point.dead_by_reason)
        self.split_documents = point.split_documents
        self.complete = point.complete
        # An empty segment fences the former writer: its next one no longer follows the last.
        if not self.complete:
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
        """Return what waits, as much as a segment holds, by position."""
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
        """
        self.done.add(outcome.position for outcome in outcomes)
        for outcome in outcomes:
            self.count(outcome)
            if not outcome.carried:
                self._process.items[_what_became(outcome.result),] += 1
        # The last segment: the input is read and nothing waits.
        self.complete = at_end and not self.waiting
        assert self.done.is_whole or not self.complete, "no place is left out"
        segment = JobSegment(outcomes=outcomes, checkpoint=self._checkpoint())
        # Shielded: a cancel must not leave open whether the segment was stored.
        self._appending = asyncio.ensure_future(self._append_segment(segment))
        await asyncio.shield(self._appending)

    async def _append_segment(self, segment: JobSegment) -> None:
        store = self._process.store
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

    def _checkpoint(self) -> JobCheckpoint:
        return JobCheckpoint(
            low_water=self.done.low_water,
            done=self.done.ranges,
            complete=self.complete,
            counts=self.counts,
            dead_by_reason=self.reasons,
            writer=self._process.name,
            epoch=self._epoch,
            split_documents=self.split_documents,
            unfinished=self._unfinished,
        )

    async def close(self, left: "UnfinishedItems", error: pb.JobItemError | None) -> None:
        """Write the last segment of an attempt that ended early.

        Args:
            left: the unfinished items.
            error: their error, except for bad lines; None: the items are unknown.

        Raises:
            Fenced: another process wrote meanwhile.
            StorageFull: JetStream is full.
        """
        self.counts.total += left.count
        self.counts.dead += left.count
        self.counts.bad_lines += sum(left.reasons[reason] for reason in BAD_LINES)
        self.counts.error_bytes += left.line_bytes
        self.reasons.update(left.reasons)
        self._unfinished, self.complete = error, True
        await self._append_segment(JobSegment(checkpoint=self._checkpoint()))

    def count(self, outcome: ItemOutcome) -> None:
        """Add an outcome to the counts."""
        counts, result = self.counts, outcome.result
        counts.total += 1
        size = len(encoded_line(self.key[0], result))
        counts.error_bytes -= self.earlier_bytes.pop(outcome.position, 0)
        self.split_documents += result.parts > 1 and result.part == 0
        # A retried dead letter no longer counts under its earlier reason, whatever became of it.
        if (earlier := self.earlier_reasons.pop(outcome.position, "")) != "":
            self.reasons[earlier] -= 1
        if result.HasField("error"):
            counts.dead += 1
            counts.error_bytes += size
            counts.bad_lines += result.error.reason in BAD_LINES
            self.reasons[result.error.reason] += 1
            return
        answer = result.answer
        counts.succeeded += 1
        counts.output_bytes += size
        if outcome.carried:  # computed and counted in an earlier stage
            return
        counts.retried += result.attempts > 1
        usage = answer.usage
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


@dataclass
class UnfinishedItems:
    """Unfinished items of an attempt that ended early.

    Attributes:
        reasons: how many have each reason.
        line_bytes: bytes of their lines in the error file.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    line_bytes: int = 0

    @property
    def count(self) -> int:
        """Number of items."""
        return self.reasons.total()

    def add(self, job: str, result: pb.JobResult) -> None:
        """Count one of them."""
        self.reasons[result.error.reason] += 1
        self.line_bytes += len(encoded_line(job, result))


def _what_became(result: pb.JobResult) -> str:
    """Return the outcome as a word for metrics."""
    if result.HasField("error"):
        return "dead"
    return "deduplicated" if result.answer.deduplicated else "succeeded"
