"""Engines that use no KV blocks, so that slots limit them and no cache: their base classes, and the echo engine."""

from abc import abstractmethod
from collections import abc
from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from model_workers.engine.blocks import BlockManager
from model_workers.engine.protocol import SequenceEnd, SequenceSpec, SequenceStep, TokenLogprobs
from model_workers.engine.scheduler import ScheduledEngine, Scheduler
from model_workers.engine.sequences import Sequence, SequenceLimits
from sluice.internal.v1.worker_pb2 import WorkerLoad


class CachelessEngine(ScheduledEngine):
    """Base of engines without a cache; they implement `add` and `step`."""

    def __init__(self, limits: SequenceLimits) -> None:
        # One block a sequence, and one of the scheduler's reserve: nothing is cached, so only slots limit it.
        blocks = BlockManager(2 * limits.slots, limits.context_tokens, prefix_cache="off")
        super().__init__(Scheduler(blocks, limits))

    @override
    def abort(self, message: str) -> list[SequenceStep]:
        sequences = self._scheduler.sequences()
        for sequence in sequences:
            self._scheduler.finish(sequence)
        return [sequence.end_step(SequenceEnd.RETURNED, message) for sequence in sequences]

    @override
    def load(self) -> WorkerLoad:
        load = self._scheduler.load(self._steps)
        load.block_tokens = load.cache_blocks = load.free_blocks = 0
        return load


class WholeTextEngine(CachelessEngine):
    """Base of engines that read whole texts in one step; they implement `_answers`.

    The scheduler admits `prefill_tokens` per step, so that cancels and urgent sequences are handled in between.
    """

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        sampling = replace(sequence.sampling, stop_token_ids=frozenset(), max_tokens=1)
        self._scheduler.add(replace(sequence, sampling=sampling))

    @override
    def step(self, now: float) -> list[SequenceStep]:
        self._steps += 1
        steps = [sequence.end_step(end) for sequence, end in self._scheduler.sweep(now)]
        whole = []
        for sequence, count in self._scheduler.schedule():
            if sequence.pending == count:
                whole.append(sequence)
            self._scheduler.advance(sequence, count)
        if whole:
            steps += self._answers(whole)
            for sequence in whole:
                self._scheduler.finish(sequence)
        return steps

    @abstractmethod
    def _answers(self, sequences: abc.Sequence[Sequence]) -> list[SequenceStep]:
        """Return the last step of each sequence."""


class EchoEngine(CachelessEngine):
    """An engine without a model: repeats the prompt's tokens up to max_tokens.

    For load tests of everything around an engine: one token per running sequence and step; each step calls `pause`
    first. Stop tokens do not end an echo, because chat templates put them into prompts.
    """

    def __init__(
        self,
        slots: int,
        max_waiting: int,
        context_tokens: int,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        # Prompt tokens for all slots: `_answer` relies on prompts that are whole in one step.
        super().__init__(SequenceLimits(slots, max_waiting, context_tokens, slots * context_tokens))
        self._pause = pause

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        sampling = replace(sequence.sampling, stop_token_ids=frozenset())
        self._scheduler.add(replace(sequence, sampling=sampling))

    @override
    def step(self, now: float) -> list[SequenceStep]:
        self._pause()
        self._steps += 1
        steps = [sequence.end_step(end) for sequence, end in self._scheduler.sweep(now)]
        return steps + [
            self._answer(sequence, count) for sequence, count in self._scheduler.schedule()
        ]

    def _answer(self, sequence: Sequence, count: int) -> SequenceStep:
        prompt, sampling = sequence.spec.prompt, sequence.spec.sampling
        token_id = prompt[sequence.answered % len(prompt)]
        top = ((token_id, 0.0),) if sampling.top_logprobs else ()
        logprobs = (TokenLogprobs(0.0, top),) if sampling.logprobs else ()
        step = sequence.take((token_id,), logprobs)
        self._scheduler.advance(sequence, count)
        if step.end is not None:
            self._scheduler.finish(sequence)
        return step
