"""Which rows are with which worker: the batches on their way, and all rows sent and not back."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from batcher.core.rows import Row
from batcher.core.scheduler.task import Batch
from sluice.wire.subjects import RANKS


@dataclass(slots=True)
class Flight:
    """Rows that a batcher has with one worker."""

    rows: int = 0
    """In the worker, or on their way to it."""
    unanswered: int = 0
    """Of these the worker's reports may know nothing yet."""
    prefill_tokens_unanswered: int = 0
    cache_tokens_unanswered: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """What a batcher has with one worker."""

    by_rank: tuple[Flight, ...] = ()
    """By class, the most urgent first."""
    batches_unanswered: int = 0

    @property
    def rows(self) -> int:
        """In the worker, or on their way to it."""
        return sum(flight.rows for flight in self.by_rank)

    @property
    def rows_unanswered(self) -> int:
        """Of these the worker's reports may know nothing yet."""
        return sum(flight.unanswered for flight in self.by_rank)

    @property
    def prefill_tokens_unanswered(self) -> int:
        """Of these rows."""
        return sum(flight.prefill_tokens_unanswered for flight in self.by_rank)

    @property
    def cache_tokens_unanswered(self) -> int:
        """Of these rows."""
        return sum(flight.cache_tokens_unanswered for flight in self.by_rank)


class _Member(NamedTuple):
    rank: int
    attempt: int
    prefill_tokens: int
    cache_tokens: int


@dataclass(slots=True)
class _Worker:
    worker_id: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0] * len(RANKS))
    """Of the rows, by rank."""
    batches: dict[str, dict[str, _Member]] = field(default_factory=dict)
    """Batches that the worker has not answered, without the rows that were heard of."""


class Transit:
    """Rows in flight, by worker."""

    def __init__(self) -> None:
        self._workers: defaultdict[str, _Worker] = defaultdict(_Worker)

    def live(self, worker: str, worker_id: str) -> None:
        """The worker can be sent to; ``worker_id`` is what it calls itself."""
        self._workers[worker].worker_id = worker_id

    def id_of(self, worker: str) -> str:
        """What the worker calls itself."""
        return self._workers[worker].worker_id

    def sent(self, worker: str) -> Sent:
        """What the worker has, or is about to get."""
        flight = self._workers[worker]
        by_rank = tuple(Flight(rows) for rows in flight.counts)
        for batch in flight.batches.values():
            for member in batch.values():
                of_rank = by_rank[member.rank]
                of_rank.unanswered += 1
                of_rank.prefill_tokens_unanswered += member.prefill_tokens
                of_rank.cache_tokens_unanswered += member.cache_tokens
        return Sent(by_rank, len(flight.batches))

    def start(self, batch_id: str, batch: Batch, rows: list[Row]) -> None:
        """A batch goes out."""
        flight = self._workers[batch.worker]
        flight.batches[batch_id] = {
            row.id: _Member(_rank(row), row.attempt, place.prefill_tokens, place.cache_tokens)
            for row, place in zip(rows, batch.rows, strict=True)
        }
        for row in rows:
            if row.id not in flight.rows:
                flight.counts[_rank(row)] += 1
            flight.rows[row.id] = row

    def answered(self, worker: str, batch_id: str) -> dict[str, int]:
        """The worker answered a batch: its rows that were not heard of before, with their attempts."""
        members = self._workers[worker].batches.pop(batch_id, {})
        return {request_id: member.attempt for request_id, member in members.items()}

    def heard(self, row: Row) -> None:
        """A frame of a row came before the answer to its batch."""
        members = self._workers[row.worker].batches.get(row.batch.batch_id)
        if members is not None:
            members.pop(row.id, None)

    def land(self, row: Row) -> None:
        """The worker has nothing more to do for the row."""
        flight = self._workers[row.worker]
        if flight.rows.pop(row.id, None) is not None:
            flight.counts[_rank(row)] -= 1

    def lose(self, worker: str) -> list[Row]:
        """The worker is lost: the rows it had."""
        return list(self._workers.pop(worker, _Worker()).rows.values())


def _rank(row: Row) -> int:
    return RANKS[row.task.priority_class]
