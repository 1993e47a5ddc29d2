"""One padded batch inside transformers' `generate()`, on a thread of its own.

The thread and the engine's thread take turns: `BatchRun.advance` lets `generate()` compute one token of every sequence,
and waits for it. So only one of the two ever touches the rows, and one token is one step of the engine. In each turn
`generate()` calls

1. `_Draw` (a logits processor), where our sampler draws by (seed, position); greedy decoding then takes what it drew;
2. `_Ends` (a stopping criterion), where each row takes its token, and which ends sequences one by one;
3. `_Handover` (a streamer), which hands the step over and waits for the next turn.
"""

from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from model_workers.engine.generate.model import GenerateModel
from model_workers.engine.protocol import RowEnd, RowStep
from model_workers.engine.rows import Row
from model_workers.engine.sampling.sampler import DrawRequest, DrawResult, Sampler


class _Stopped(Exception):
    """Leaves `generate()`: no row wants another token."""


class BatchRun:
    """A batch that is being computed.

    Attributes:
        live: the rows that get tokens, by their place in the batch.
    """

    def __init__(self, model: GenerateModel, sampler: Sampler, rows: Sequence[Row]) -> None:
        self.live = dict(enumerate(rows))
        self._model = model
        self._sampler = sampler
        self._rows = rows
        self._drawn: dict[int, DrawResult] = {}
        self._steps: list[tuple[Row, RowStep]] = []
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """Whether `generate()` goes on."""
        self._results: SimpleQueue[list[tuple[Row, RowStep]] | BaseException] = SimpleQueue()
        # Started by the engine's thread, so that it has its priority.
        self._thread = Thread(target=self._generate, name="generate", daemon=True)

    def advance(self) -> list[tuple[Row, RowStep]]:
        """Compute the next token of each live row.

        Raises:
            Exception: what `generate()` raised; the run is over.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._turns.put(True)
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def drop(self, row: Row) -> None:
        """Report no more of a row; its sequence ends at the next token."""
        self.live = {place: other for place, other in self.live.items() if other is not row}

    def stop(self) -> None:
        """Leave `generate()` without another token."""
        self._turns.put(False)

    def _generate(self) -> None:
        try:
            self._wait()
            self._model.generate(
                [row.tokens for row in self._rows],
                self._rows[0].answered,
                max(row.room for row in self._rows),
                logits_processor=[_Draw(self)],
                stopping_criteria=[_Ends(self)],
                streamer=_Handover(self),
            )
            if self.live:
                raise RuntimeError("generate() ended before its rows did")
        except _Stopped:
            pass
        except BaseException as error:
            self._results.put(error)

    def _wait(self) -> None:
        if not self._turns.get():
            raise _Stopped

    def draw(self, logits: Tensor) -> Tensor:
        """Draw a token for each live row; returns those of all sequences, padding where none is wanted."""
        places = list(self.live)
        rows = [self.live[place] for place in places]
        requests = [DrawRequest(row.sampling) for row in rows if row.sampling is not None]
        wanted = logits[places]
        self._model.restrict(rows, wanted)
        self._drawn = dict(zip(places, self._sampler.draw(wanted, requests), strict=True))
        tokens = [self._model.pad] * len(self._rows)
        for place, drawn in self._drawn.items():
            tokens[place] = drawn.token_ids[0] if drawn.token_ids else self._model.pad
        return torch.tensor(tokens, device=logits.device)

    def take(self) -> list[bool]:
        """Give each live row the token that was drawn for it; returns which sequences have ended."""
        self._steps = []
        for place, drawn in self._drawn.items():
            row = self.live[place]
            step = row.take(drawn.token_ids, drawn.logprobs)
            if drawn.error:
                step = replace(step, end=RowEnd.FAILED, error=drawn.error)
            if step.end is not None:
                del self.live[place]
            self._steps.append((row, step))
        return [place not in self.live for place in range(len(self._rows))]

    def hand_over(self) -> None:
        """End the turn."""
        # The list is the other thread's from here on, and so is `live`.
        is_over = not self.live
        self._results.put(self._steps)
        if not is_over:
            self._wait()


class _Draw(LogitsProcessor):
    """Leaves one token of each sequence possible: the one that our sampler draws."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    @override
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        only = torch.full_like(scores, -torch.inf)
        return only.scatter_(1, self._run.draw(scores)[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Ends each sequence when its row does."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    @override
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor(self._run.take(), device=input_ids.device)


class _Handover(BaseStreamer):
    """Gets the tokens of each step, [batch]."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    @override
    def put(self, value: Any) -> None:
        if value.dim() == 1:  # the first call brings the prompts, [batch, tokens]
            self._run.hand_over()

    @override
    def end(self) -> None:
        pass
