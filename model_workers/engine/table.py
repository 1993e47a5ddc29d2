"""All rows of an engine: who waits, who is in a slot, and who may come in."""

from collections import deque
from collections.abc import Collection, Iterator

from model_workers.engine.protocol import (
    EngineFull,
    Load,
    RowEnd,
    RowInvalid,
    RowSpec,
    RowStale,
    RowTooLong,
)
from model_workers.engine.rows import Row, RowState


class RowTable:
    """The rows, first come first served. Engines keep what they need per slot beside it."""

    def __init__(self, slots: int, max_waiting: int, context_tokens: int) -> None:
        self.slots = slots
        self.context_tokens = context_tokens
        self.steps = 0
        self._places = slots + max_waiting
        self._waiting: deque[Row] = deque()
        self._running: dict[int, Row] = {}
        self._newest: dict[str, Row] = {}

    def add(self, spec: RowSpec) -> None:
        """Takes a row; see `Engine.add`."""
        self._check(spec)
        old = self._newest.get(spec.request_id)
        if old is None and len(self._newest) >= self._places:
            raise EngineFull(f"all {self._places} places for rows are taken")
        if old is not None:
            self._replace(old)
        row = Row(spec, self.context_tokens)
        self._newest[spec.request_id] = row
        self._waiting.append(row)

    def cancel(self, request_ids: Collection[str]) -> None:
        """Marks rows; the next `sweep` takes them out."""
        for request_id in request_ids:
            row = self._newest.get(request_id)
            if row is not None:
                row.cancelled = True

    def sweep(self, now: float) -> list[tuple[Row, RowEnd]]:
        """Takes out rows that must not be computed any further; replaced ones are among them, as CANCELLED."""
        ended = [(row, end) for row in self._all() if (end := self._end_of(row, now)) is not None]
        for row, _ in ended:
            self.end(row)
        return ended

    def join(self) -> Row | None:
        """The next waiting row, now in a slot (PREFILL); None when nobody waits or no slot is free."""
        if not self._waiting or len(self._running) >= self.slots:
            return None
        row = self._waiting.popleft()
        row.move(RowState.PREFILL)
        self._running[id(row)] = row
        return row

    def next_length(self) -> int | None:
        """Length of the row that `join` would return, tokens; None where it would return None."""
        if not self._waiting or len(self._running) >= self.slots:
            return None
        return self._waiting[0].length

    def end(self, row: Row) -> None:
        """Takes a row out."""
        if row.state is RowState.WAITING:
            self._waiting.remove(row)
        else:
            del self._running[id(row)]
        row.move(RowState.ENDED)
        if self._newest.get(row.spec.request_id) is row:
            del self._newest[row.spec.request_id]

    def drain(self) -> list[Row]:
        """Takes all rows out; returns those that somebody waits for."""
        rows = list(self._all())
        for row in rows:
            self.end(row)
        return [row for row in rows if not row.replaced]

    def load(self) -> Load:
        """The load now."""
        running = len(self._running)
        return Load(self.slots, running, len(self._waiting), self.context_tokens, self.steps)

    def _check(self, spec: RowSpec) -> None:
        old = self._newest.get(spec.request_id)
        if old is not None and spec.attempt <= old.spec.attempt:
            raise RowStale(f"attempt {old.spec.attempt} of this request is here already")
        if not spec.prompt:
            raise RowInvalid("the prompt has no tokens")
        if len(spec.prompt) >= self.context_tokens:
            raise RowTooLong(
                f"a prompt of {len(spec.prompt)} tokens leaves no room for an answer "
                f"in a context of {self.context_tokens}"
            )

    def _replace(self, old: Row) -> None:
        old.replaced = True
        if old.state is RowState.WAITING:
            self.end(old)

    def _all(self) -> Iterator[Row]:
        yield from self._running.values()
        yield from self._waiting

    def _end_of(self, row: Row, now: float) -> RowEnd | None:
        return RowEnd.CANCELLED if row.replaced else row.end_now(now)
