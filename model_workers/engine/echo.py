"""The engine without a model: answers with the prompt's own tokens again and again, up to max_tokens.

For load tests of everything around an engine. Stop tokens do not end an echo: a chat template puts them into prompts.
"""

from collections.abc import Callable
from dataclasses import replace

from model_workers.engine.cacheless import CachelessEngine
from model_workers.engine.protocol import RowSpec, RowStep, TokenLogprobs
from model_workers.engine.roster import Limits
from model_workers.engine.rows import Row


class EchoEngine(CachelessEngine):
    """One token per row and step, of which each calls ``pause`` first; see `Engine`."""

    def __init__(
        self,
        slots: int,
        max_waiting: int,
        context_tokens: int,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(Limits(slots, max_waiting, context_tokens, slots * context_tokens))
        self._pause = pause

    def add(self, row: RowSpec, now: float) -> None:
        """See `Engine.add`."""
        sampling = replace(row.sampling, stop_token_ids=frozenset())
        self._scheduler.add(replace(row, sampling=sampling))

    def step(self, now: float) -> list[RowStep]:
        """See `Engine.step`."""
        self._pause()
        self._steps += 1
        steps = [row.closing(end) for row, end in self._scheduler.sweep(now)]
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
