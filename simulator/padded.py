"""An engine with static batches: every row is computed as long as the longest, and a batch ends before the next begins.

What padding costs shows here. A batch of n rows takes one step over n times the longest prompt, and then as many steps
over n rows as the longest answer has more tokens. Its rows are answered together.
"""

from collections import deque
from collections.abc import Sequence

from batcher.core.rooms import Use
from simulator.cost import StepCost
from simulator.engine import EngineLimits, EngineLoad, EngineRow, Progress, Stretch


class PaddedEngine:
    """See `Engine`; it holds one batch that runs and as many more as ``limits.waiting`` has rows for."""

    def __init__(self, cost: StepCost, limits: EngineLimits) -> None:
        self._cost = cost
        self._limits = limits
        self._waiting: deque[list[EngineRow]] = deque()
        self._batch: list[EngineRow] = []
        self._done = 0
        self._cancelled: set[str] = set()

    def admit(self, rows: Sequence[EngineRow]) -> list[str]:
        """See `Engine`; more rows than slots make no batch."""
        room = self._limits.slots if self._idle else self._room()
        room = min(room, self._limits.slots)
        if rows[:room]:
            self._waiting.append(list(rows[:room]))
        return [row.request_id for row in rows[room:]]

    def cancel(self, request_id: str) -> None:
        """See `Engine`; the row is computed all the same when its batch runs already."""
        if any(row.request_id == request_id for batch in self._all() for row in batch):
            self._cancelled.add(request_id)

    def stretch(self) -> Stretch | None:
        """See `Engine`."""
        while not self._batch and self._waiting:
            members = self._waiting.popleft()
            self._batch = [row for row in members if row.request_id not in self._cancelled]
            self._cancelled.difference_update(row.request_id for row in members)
            self._done = 0
        if not self._batch:
            return None
        rows, length = len(self._batch), max(row.length for row in self._batch)
        if not self._done:
            return Stretch(1, lambda n: n * self._cost(rows * length, 0, 0))
        one = self._cost(0, rows, rows * (length + self._done))
        growth = self._cost.context_token_s * rows
        return Stretch(self._longest - self._done, lambda n: n * one + growth * n * (n - 1) / 2)

    def advance(self, steps: int) -> Progress:
        """See `Engine`."""
        progress = Progress()
        if not self._done:
            progress.first = [row.request_id for row in self._batch if not row.produced]
        before = self._done
        self._done += steps
        for row in self._batch:
            left = row.answer - row.produced
            progress.tokens += min(left, self._done) - min(left, before)
        if self._done >= self._longest:
            progress.ended = [
                row.request_id for row in self._batch if row.request_id not in self._cancelled
            ]
            self._cancelled.difference_update(row.request_id for row in self._batch)
            self._batch = []
        return progress

    def load(self) -> EngineLoad:
        """See `Engine`; while a batch runs, no slot is free."""
        waiting = [row for batch in self._waiting for row in batch]
        return EngineLoad(
            slots=self._limits.slots,
            running=self._limits.slots if self._batch else 0,
            waiting=len(waiting),
            running_tokens=sum(row.length for row in self._batch),
            waiting_tokens=sum(row.length for row in waiting),
        )

    def uses(self) -> Sequence[Use]:
        """See `Engine`; a batch runs to its end."""
        return ()

    @property
    def _idle(self) -> bool:
        return not self._batch and not self._waiting

    @property
    def _longest(self) -> int:
        return max(row.answer - row.produced for row in self._batch)

    def _room(self) -> int:
        return max(0, self._limits.waiting - sum(len(batch) for batch in self._waiting))

    def _all(self) -> list[list[EngineRow]]:
        return [self._batch, *self._waiting]
