"""A batch while it is being filled: what is in it, and whether one more row may join."""

from batcher.core.batches import Batch, BatchCause, BatchLimit, BatchRow
from batcher.core.queue.concurrency import OpenBatch
from batcher.core.queue.entries import Entry
from batcher.core.replicas import Replica
from sluice.batching import Policy


class Filling:
    """Rows of one batch for one worker."""

    def __init__(self, policy: Policy, replica: Replica, batch: OpenBatch) -> None:
        self.replica = replica
        self.rows: list[BatchRow] = []
        self.limit = BatchLimit.ALL_WAITING
        self._batch = batch
        self._rows_max = 1
        self._rows_limit = BatchLimit.ROWS
        self._pads = policy.pads
        self._padding_max = policy.padding_max
        self._tokens_max = policy.batch_tokens_max
        self._prefill_max = 0.0
        self._cache_max = replica.free_tokens
        self._tokens = self._longest = self._cache = 0

    def narrow(self, batch_rows: int, free_rows: int, prefill_max: float) -> None:
        """Rows that follow may join up to so many rows, and so many prompt tokens in the worker."""
        self._prefill_max = prefill_max - self.replica.waiting_tokens
        self._rows_max = min(batch_rows, free_rows)
        self._rows_limit = BatchLimit.ROWS if batch_rows < free_rows else BatchLimit.WORKER_ROWS

    def takes(self, entry: Entry) -> bool:
        """Whether ``entry`` may join; else `limit` says why not. The first one always may."""
        count = len(self.rows)
        if not count:
            return True
        limit = self._refusal(entry, count + 1)
        if limit is None:
            return True
        self.limit = limit
        return False

    def put(self, entry: Entry, now: float) -> None:
        """``entry`` joins."""
        entry.batch = self._batch
        self._batch.rows += 1
        self._tokens += entry.prefill
        self._cache += entry.cache
        if entry.prefill > self._longest:
            self._longest = entry.prefill
        self.rows.append(
            BatchRow(entry.task.request_id, now - entry.since, entry.prefill, entry.cache)
        )

    def batch(self, cause: BatchCause) -> Batch:
        """What came together."""
        return Batch(
            tuple(self.rows),
            self.replica.worker,
            cause,
            self.limit,
            tokens=self._tokens,
            cache_tokens=self._cache,
            padding_share=1 - self._tokens / max(1, len(self.rows) * self._longest),
            longest_wait=max(self.rows, key=_waited),
        )

    def _refusal(self, entry: Entry, count: int) -> BatchLimit | None:
        if count > self._rows_max:
            return self._rows_limit
        tokens = self._tokens + entry.prefill
        if tokens > self._prefill_max:
            return BatchLimit.WORKER_PREFILL
        if self._cache + entry.cache > self._cache_max:
            return BatchLimit.WORKER_CACHE
        cells = count * max(self._longest, entry.prefill) if self._pads else tokens
        if cells > self._tokens_max:
            return BatchLimit.TOKENS
        if self._pads and cells - tokens > self._padding_max * cells:
            return BatchLimit.PADDING
        return None


def _waited(row: BatchRow) -> float:
    return row.waited_s
