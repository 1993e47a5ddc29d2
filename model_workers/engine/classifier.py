"""The engine of sequence classifiers: a row answers with one token, the number of its most probable label.

Its log-probabilities are those of all labels, so that nothing of the wire is different. Texts are computed whole; the
scheduler meters them out by ``prefill_tokens`` a step, so that cancels and urgent rows come through between.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from model_workers.engine.blocks import BlockManager
from model_workers.engine.protocol import Load, RowEnd, RowSpec, RowStep, TokenLogprobs
from model_workers.engine.roster import Limits
from model_workers.engine.rows import Row
from model_workers.engine.scheduler import Scheduler


class Classifier(Protocol):
    """A model that judges whole texts."""

    def logprobs(self, texts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """Natural log-probability of every label, for each text."""


class ClassifierEngine:
    """Rows in, labels out; see `Engine`."""

    def __init__(self, model: Classifier, limits: Limits) -> None:
        # One block a row, and one of reserve: there is nothing to cache, so only slots limit it.
        blocks = BlockManager(2 * limits.slots, limits.context_tokens, prefix_cache=False)
        self._model = model
        self._scheduler = Scheduler(blocks, limits)
        self._steps = 0

    def add(self, row: RowSpec, now: float) -> None:
        """See `Engine.add`."""
        sampling = replace(row.sampling, stop_token_ids=frozenset(), max_tokens=1)
        self._scheduler.add(replace(row, sampling=sampling))

    def cancel(self, request_ids: Collection[str]) -> None:
        """See `Engine.cancel`."""
        self._scheduler.cancel(request_ids)

    def step(self, now: float) -> list[RowStep]:
        """See `Engine.step`."""
        self._steps += 1
        steps = [row.closing(end) for row, end in self._scheduler.sweep(now)]
        whole = []
        for row, count in self._scheduler.schedule():
            if row.pending == count:
                whole.append(row)
            self._scheduler.advance(row, count)
        return steps + self._judged(whole)

    def abort(self, message: str) -> list[RowStep]:
        """See `Engine.abort`."""
        rows = self._scheduler.rows()
        for row in rows:
            self._scheduler.finish(row)
        return [row.closing(RowEnd.FAILED, message) for row in rows]

    def has_rows(self) -> bool:
        """See `Engine.has_rows`."""
        return self._scheduler.has_rows()

    def load(self) -> Load:
        """See `Engine.load`."""
        load = self._scheduler.load(self._steps)
        return replace(load, block_tokens=0, cache_blocks=0, free_blocks=0)

    def _judged(self, rows: Sequence[Row]) -> list[RowStep]:
        if not rows:
            return []
        judged = self._model.logprobs([row.spec.prompt for row in rows])
        return [self._answer(row, values) for row, values in zip(rows, judged, strict=True)]

    def _answer(self, row: Row, values: Sequence[float]) -> RowStep:
        order = sorted(range(len(values)), key=lambda label: -values[label])
        asked = row.spec.sampling
        top = tuple((label, values[label]) for label in order[: asked.top_logprobs])
        told = (TokenLogprobs(values[order[0]], top),) if asked.logprobs else ()
        step = row.take((order[0],), told)
        self._scheduler.finish(row)
        return step
