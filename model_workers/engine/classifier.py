"""The engine of sequence classifiers: a row answers with one token, the number of its most probable label.

Its log-probabilities are those of all labels, so that nothing of the wire is different. Texts are computed whole; the
scheduler meters them out by ``prefill_tokens`` a step, so that cancels and urgent rows come through between.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from model_workers.engine.cacheless import CachelessEngine
from model_workers.engine.protocol import RowSpec, RowStep, TokenLogprobs
from model_workers.engine.roster import Limits
from model_workers.engine.rows import Row


class Classifier(Protocol):
    """A model that judges whole texts."""

    def logprobs(self, texts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """Natural log-probability of every label, for each text."""


class ClassifierEngine(CachelessEngine):
    """Rows in, labels out; see `Engine`."""

    def __init__(self, model: Classifier, limits: Limits) -> None:
        super().__init__(limits)
        self._model = model

    def add(self, row: RowSpec, now: float) -> None:
        """See `Engine.add`."""
        sampling = replace(row.sampling, stop_token_ids=frozenset(), max_tokens=1)
        self._scheduler.add(replace(row, sampling=sampling))

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
