"""A batch while it is being filled: what is in it, and whether one more row may join."""

import math
from typing import NamedTuple, Self

from batcher.core.batches import Batch, BatchCause, BatchLimit, BatchRow
from batcher.core.queue.concurrency import OpenBatch
from batcher.core.queue.entries import Entry
from batcher.core.replicas import Replica
from sluice.settings.batching import Policy


class FillingLimits(NamedTuple):
    """What a policy limits every batch to."""

    pads: bool
    padding_max: float
    tokens_max: float

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Those of ``policy``."""
        return cls(policy.pads, policy.padding_max, policy.batch_tokens_max)


class Filling:
    """Rows of one batch for one worker.

    Attributes:
        limit: why no more rows joined.
    """

    def __init__(self, limits: FillingLimits, replica: Replica, batch: OpenBatch) -> None:
        self.replica = replica
        self.limit = BatchLimit.ALL_WAITING
        self._batch = batch
        self._rows: list[BatchRow] = []
        self._rows_max = 1
        self._rows_limit = BatchLimit.ROWS
        self._pads, self._padding_max, self._tokens_max = limits
        self._prefill_max = 0.0
        self._cache_max = replica.free_tokens
        self._tokens = self._longest = self._cache = 0
        self._oldest = math.inf
        self._longest_wait: BatchRow | None = None

    def narrow(self, batch_rows: int, free_rows: int, prefill_max: float) -> None:
        """Rows that follow may join up to so many rows, and so many prompt tokens in the worker."""
        self._prefill_max = prefill_max - self.replica.waiting_tokens
        self._rows_max = min(batch_rows, free_rows)
        self._rows_limit = BatchLimit.ROWS if batch_rows < free_rows else BatchLimit.WORKER_ROWS

    def has_row(self) -> bool:
        """Whether there may be one more row; else `limit` says why not."""
        if len(self._rows) < self._rows_max:
            return True
        self.limit = self._rows_limit
        return False

    def takes(self, entry: Entry) -> bool:
        """Whether ``entry`` may join as one more row; else `limit` says why not."""
        tokens = self._tokens + entry.prefill
        if tokens > self._prefill_max:
            self.limit = BatchLimit.WORKER_PREFILL
        elif self._cache + entry.cache > self._cache_max:
            self.limit = BatchLimit.WORKER_CACHE
        elif self._pads:
            cells = (len(self._rows) + 1) * max(self._longest, entry.prefill)
            return self._takes_padded(cells, tokens)
        elif tokens > self._tokens_max:
            self.limit = BatchLimit.TOKENS
        else:
            return True
        return False

    def _takes_padded(self, cells: int, tokens: int) -> bool:
        if cells > self._tokens_max:
            self.limit = BatchLimit.TOKENS
        elif cells - tokens > self._padding_max * cells:
            self.limit = BatchLimit.PADDING
        else:
            return True
        return False

    def put(self, entry: Entry, now: float) -> None:
        """``entry`` joins."""
        prefill, cache, since = entry.prefill, entry.cache, entry.since
        entry.batch = self._batch
        self._tokens += prefill
        self._cache += cache
        if prefill > self._longest:
            self._longest = prefill
        row = BatchRow(entry.task.request_id, now - since, prefill, cache)
        self._rows.append(row)
        if since < self._oldest:
            self._oldest, self._longest_wait = since, row

    def batch(self, cause: BatchCause) -> Batch:
        """What came together: one row at least."""
        assert self._longest_wait is not None
        rows = tuple(self._rows)
        self._batch.rows = len(rows)
        padding_share = 1 - self._tokens / max(1, len(rows) * self._longest)
        return Batch(
            rows,
            self.replica.worker,
            cause,
            self.limit,
            self._tokens,
            self._cache,
            padding_share,
            self._longest_wait,
        )
