"""Engines without a KV cache, limited by slots alone: their base classes, and the echo engine."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from typing_extensions import override

from model_workers.engine.blocks import BlockManager
from model_workers.engine.protocol import RowEnd, RowSpec, RowStep, TokenLogprobs
from model_workers.engine.rows import Row, RowLimits
from model_workers.engine.scheduler import ScheduledEngine, Scheduler
from sluice.internal.v1 import worker_pb2


class CachelessEngine(ScheduledEngine):
    """The parts of `Engine` that do not depend on what is computed; `add` and `step` are the engine's own."""

    def __init__(self, limits: RowLimits) -> None:
        # One block a row, and one of the scheduler's reserve: nothing is cached, so only slots limit it.
        blocks = BlockManager(2 * limits.slots, limits.context_tokens, prefix_cache="off")
        super().__init__(Scheduler(blocks, limits))

    @override
    def abort(self, message: str) -> list[RowStep]:
        rows = self._scheduler.rows()
        for row in rows:
            self._scheduler.finish(row)
        return [row.end_step(RowEnd.RETURNED, message) for row in rows]

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        load = self._scheduler.load(self._steps)
        load.block_tokens = load.cache_blocks = load.free_blocks = 0
        return load


class WholeTextEngine(CachelessEngine):
    """An engine of models that read a text at once; `_answers` is the engine's own.

    The scheduler admits ``prefill_tokens`` a step, so that cancels and urgent rows are handled in between.
    """

    @override
    def add(self, row: RowSpec, now: float) -> None:
        sampling = replace(row.sampling, stop_token_ids=frozenset(), max_tokens=1)
        self._scheduler.add(replace(row, sampling=sampling))

    @override
    def step(self, now: float) -> list[RowStep]:
        self._steps += 1
        steps = [row.end_step(end) for row, end in self._scheduler.sweep(now)]
        whole = []
        for row, count in self._scheduler.schedule():
            if row.pending == count:
                whole.append(row)
            self._scheduler.advance(row, count)
        if whole:
            steps += self._answers(whole)
            for row in whole:
                self._scheduler.finish(row)
        return steps

    @abstractmethod
    def _answers(self, rows: Sequence[Row]) -> list[RowStep]:
        """The end of each row."""


class EchoEngine(CachelessEngine):
    """The engine without a model: answers with the prompt's own tokens again and again, up to max_tokens. See `Engine`.

    For load tests of everything around an engine: one token per row and step, and each step calls ``pause`` first. Stop
    tokens do not end an echo, because a chat template puts them into prompts.
    """

    def __init__(
        self,
        slots: int,
        max_waiting: int,
        context_tokens: int,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(RowLimits(slots, max_waiting, context_tokens, slots * context_tokens))
        self._pause = pause

    @override
    def add(self, row: RowSpec, now: float) -> None:
        sampling = replace(row.sampling, stop_token_ids=frozenset())
        self._scheduler.add(replace(row, sampling=sampling))

    @override
    def step(self, now: float) -> list[RowStep]:
        self._pause()
        self._steps += 1
        steps = [row.end_step(end) for row, end in self._scheduler.sweep(now)]
        return steps + [self._answer(row, count) for row, count in self._scheduler.schedule()]

    def _answer(self, row: Row, count: int) -> RowStep:
        prompt, sampling = row.spec.prompt, row.spec.sampling
        token_id = prompt[row.answered % len(prompt)]
        top = ((token_id, 0.0),) if sampling.top_logprobs else ()
        logprobs = (TokenLogprobs(0.0, top),) if sampling.logprobs else ()
        step = row.take((token_id,), logprobs)
        self._scheduler.advance(row, count)
        if step.end is not None:
            self._scheduler.finish(row)
        return step
