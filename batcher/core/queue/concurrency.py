"""Batches that are out: how many each worker still computes, and how large the next may be."""

from typing import Final

from sluice.settings.batching import Policy

WELL_WITHIN: Final = 0.8
BEYOND: Final = 1.2
"""Below the one share of the latency target batches may grow, above the other they shrink."""


class OpenBatch:
    """A batch of which some rows are still out."""

    __slots__ = ("rows", "sent_at", "worker")

    def __init__(self, worker: str, sent_at: float) -> None:
        self.worker = worker
        self.rows = 0
        self.sent_at = sent_at


class Concurrency:
    """Batches that are out.

    Attributes:
        max_rows: most rows of a batch now.
    """

    def __init__(self, policy: Policy) -> None:
        self._open: dict[str, int] = {}
        self.reconfigure(policy)

    def reconfigure(self, policy: Policy) -> None:
        """Goes on under another policy."""
        self._rows_most = policy.max_rows
        self._target_s = policy.latency_target_s
        self.max_rows = policy.max_rows if self._target_s is None else 1

    def open(self, worker: str, now: float) -> OpenBatch:
        """A batch goes to ``worker``; the caller counts its rows in."""
        self._open[worker] = self._open.get(worker, 0) + 1
        return OpenBatch(worker, now)

    def row_ended(self, batch: OpenBatch, now: float | None) -> None:
        """A row of ``batch`` is not out any more; without ``now`` that tells nothing about latencies."""
        batch.rows -= 1
        if batch.rows:
            return
        self._open[batch.worker] -= 1
        if not self._open[batch.worker]:
            del self._open[batch.worker]
        if self._target_s is not None and now is not None:
            self._adapt(now - batch.sent_at, self._target_s)

    def running(self, worker: str) -> int:
        """Batches of which the worker still computes a row."""
        return self._open.get(worker, 0)

    def _adapt(self, took_s: float, target_s: float) -> None:
        if took_s < WELL_WITHIN * target_s:
            self.max_rows = min(self.max_rows + 1, self._rows_most)
        elif took_s > BEYOND * target_s:
            self.max_rows = max(self.max_rows - 1, 1)
