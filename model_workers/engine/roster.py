"""All rows of an engine by request: who may come in, and who must go."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from model_workers.engine.protocol import (
    EngineFull,
    RowEnd,
    RowInvalid,
    RowSpec,
    RowStale,
    RowTooLong,
)
from model_workers.engine.rows import Row


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine keeps to.

    Attributes:
        slots: most rows that run at once.
        max_waiting: rows that may be here beyond those.
        context_tokens: longest row.
        prefill_tokens: most tokens of prompts in a step.
    """

    slots: int
    max_waiting: int
    context_tokens: int
    prefill_tokens: int


class Roster:
    """The newest row of every request."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows: dict[str, Row] = {}
        self._arrivals = 0
        self._look_at = math.inf

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def add(self, spec: RowSpec) -> tuple[Row, Row | None]:
        """A new row, and the one of a lower attempt whose place it takes; see `Engine.add`."""
        old = self._rows.get(spec.request_id)
        self._check(spec, old)
        row = Row(spec, self._limits.context_tokens, self._arrivals)
        self._arrivals += 1
        self._rows[spec.request_id] = row
        if row.end_by_tokens() is not None:
            self._look_at = -math.inf
        elif spec.deadline is not None:
            self._look_at = min(self._look_at, spec.deadline)
        return row, old

    def remove(self, row: Row) -> None:
        """A row has ended."""
        if self._rows.get(row.spec.request_id) is row:
            del self._rows[row.spec.request_id]

    def cancel(self, request_ids: Collection[str]) -> None:
        """Marks rows; unknown ones are ignored."""
        for request_id in request_ids:
            row = self._rows.get(request_id)
            if row is not None:
                row.cancelled = True
                self._look_at = -math.inf

    def due(self, now: float) -> list[tuple[Row, RowEnd]]:
        """Rows that must not be computed any further, and why. All rows are looked at only when one may be due."""
        if now < self._look_at:
            return []
        ended = [(row, end) for row in self if (end := row.end_now(now)) is not None]
        gone = {row for row, _ in ended}
        deadlines = (row.spec.deadline for row in self if row not in gone)
        self._look_at = min((d for d in deadlines if d is not None), default=math.inf)
        return ended

    def _check(self, spec: RowSpec, old: Row | None) -> None:
        if old is not None and spec.attempt <= old.spec.attempt:
            raise RowStale(f"attempt {old.spec.attempt} of this request is here already")
        if not spec.prompt:
            raise RowInvalid("the prompt has no tokens")
        context_tokens = self._limits.context_tokens
        if len(spec.prompt) >= context_tokens:
            raise RowTooLong(
                f"a prompt of {len(spec.prompt)} tokens leaves no room for an answer "
                f"in a context of {context_tokens}"
            )
        if old is None and len(self) >= self._limits.slots + self._limits.max_waiting:
            raise EngineFull(f"all {len(self)} places for rows are taken")
