"""The engine without a model: answers with the prompt's own tokens again and again, up to max_tokens.

For load tests of everything around an engine. Stop tokens do not end an echo: a chat template puts them into prompts.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from model_workers.engine.protocol import Load, RowEnd, RowSpec, RowStep, TokenLogprobs
from model_workers.engine.rows import Row, RowState
from model_workers.engine.table import RowTable


class EchoEngine:
    """One token per row and step, of which each calls ``pause`` first; see `Engine`."""

    def __init__(
        self,
        slots: int,
        max_waiting: int,
        context_tokens: int,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._pause = pause
        self._table = RowTable(slots, max_waiting, context_tokens)
        self._rows: list[Row] = []

    def add(self, row: RowSpec, now: float) -> None:
        """See `Engine.add`."""
        sampling = replace(row.sampling, stop_token_ids=frozenset())
        self._table.add(replace(row, sampling=sampling))

    def cancel(self, request_ids: Collection[str]) -> None:
        """See `Engine.cancel`."""
        self._table.cancel(request_ids)

    def step(self, now: float) -> list[RowStep]:
        """See `Engine.step`."""
        self._pause()
        swept = self._table.sweep(now)
        while (row := self._table.join()) is not None:
            self._rows.append(row)
        self._table.steps += 1
        rows = [row for row in self._rows if row.state is not RowState.ENDED]
        steps = [self._answer(row) for row in rows]
        self._rows = [row for row in rows if row.state is not RowState.ENDED]
        return [row.closing(end) for row, end in swept if not row.replaced] + steps

    def abort(self, message: str) -> list[RowStep]:
        """See `Engine.abort`."""
        self._rows = []
        return [row.closing(RowEnd.FAILED, message) for row in self._table.drain()]

    def load(self) -> Load:
        """See `Engine.load`."""
        return self._table.load()

    def _answer(self, row: Row) -> RowStep:
        if row.state is RowState.PREFILL:
            row.move(RowState.DECODE)
        prompt, sampling = row.spec.prompt, row.spec.sampling
        token_id = prompt[len(row.tokens) % len(prompt)]
        top = ((token_id, 0.0),) if sampling.top_logprobs else ()
        step = row.take(token_id, TokenLogprobs(0.0, top) if sampling.logprobs else None)
        if step.end is not None:
            self._table.end(row)
        return step
