"""One padded batch inside transformers' `generate()`, on a thread of its own.

That thread and the engine's thread take turns: `BatchRun.advance` lets `generate()` compute one token of every sequence
and waits for it. So only one of the two ever touches the sequences, and one token is one step of the engine. In each
turn `generate()` calls

1. `_Draw` (a logits processor): our sampler draws by (seed, position); greedy decoding then takes its token;
2. `_Ends` (a stopping criterion): each sequence gets its token, and sequences end one by one;
3. `_Handover` (a streamer): hands the step over and waits for the next turn.
"""

from collections import abc
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
from model_workers.engine.protocol import SequenceEnd, SequenceStep
from model_workers.engine.sampling.sampler import DrawRequest, DrawResult, Sampler
from model_workers.engine.sequences import Sequence


class _Stopped(Exception):
    """Leaves `generate()`: no sequence needs another token."""


class BatchRun:
    """A batch that is being computed.

    Attributes:
        live: Sequences that get tokens, by their index in the batch.
    """

    def __init__(
        self, model: GenerateModel, sampler: Sampler, sequences: abc.Sequence[Sequence]
    ) -> None:
        self.live = dict(enumerate(sequences))
        self._model = model
        self._sampler = sampler
        self._sequences = sequences
        self._drawn: dict[int, DrawResult] = {}
        self._steps: list[tuple[Sequence, SequenceStep]] = []
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """Whether `generate()` may continue."""
        self._results: SimpleQueue[list[tuple[Sequence, SequenceStep]] | BaseException] = (
            SimpleQueue()
        )
        # Started by the engine's thread, so that it has its priority.
        self._thread = Thread(target=self._generate, name="generate", daemon=True)

    def advance(self) -> list[tuple[Sequence, SequenceStep]]:
        """Compute the next token of each live sequence.

        Raises:
            Exception: What `generate()` raised; the run is over.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._turns.put(True)
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def drop(self, sequence: Sequence) -> None:
        """Stop reporting a sequence, which ends at the next token."""
        self.live = {place: other for place, other in self.live.items() if other is not sequence}

    def stop(self) -> None:
        """Leave `generate()` without another token."""
        self._turns.put(False)

    def _generate(self) -> None:
        try:
            self._wait()
            self._model.generate(
                [sequence.tokens for sequence in self._sequences],
                self._sequences[0].answered,
                max(sequence.room for sequence in self._sequences),
                logits_processor=[_Draw(self)],
                stopping_criteria=[_Ends(self)],
                streamer=_Handover(self),
            )
            if self.live:
                raise RuntimeError("generate() ended before its sequences did")
        except _Stopped:
            pass
        except BaseException as error:
            self._results.put(error)

    def _wait(self) -> None:
        if not self._turns.get():
            raise _Stopped

    def draw(self, logits: Tensor) -> Tensor:
        """Draw a token for each live sequence; return the tokens of all sequences, with padding for the others."""
        places = list(self.live)
        sequences = [self.live[place] for place in places]
        requests = [
            DrawRequest(sequence.sampling)
            for sequence in sequences
            if sequence.sampling is not None
        ]
        logits_of_places = logits[places]
        self._model.restrict(sequences, logits_of_places)
        self._drawn = dict(zip(places, self._sampler.draw(logits_of_places, requests), strict=True))
        tokens = [self._model.pad] * len(self._sequences)
        for place, drawn in self._drawn.items():
            tokens[place] = drawn.token_ids[0] if drawn.token_ids else self._model.pad
        return torch.tensor(tokens, device=logits.device)

    def take(self) -> list[bool]:
        """Give each live sequence its drawn token; return which sequences have ended."""
        self._steps = []
        for place, drawn in self._drawn.items():
            sequence = self.live[place]
            step = sequence.take(drawn.token_ids, drawn.logprobs)
            if drawn.error:
                step = replace(step, end=SequenceEnd.FAILED, error=drawn.error)
            if step.end is not None:
                del self.live[place]
            self._steps.append((sequence, step))
        return [place not in self.live for place in range(len(self._sequences))]

    def hand_over(self) -> None:
        """End the turn."""
        # The list is the other thread's from here on, and so is `live`.
        is_over = not self.live
        self._results.put(self._steps)
        if not is_over:
            self._wait()


class _Draw(LogitsProcessor):
    """Makes every token of a sequence impossible but the one that our sampler draws."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    @override
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        only = torch.full_like(scores, -torch.inf)
        return only.scatter_(1, self._run.draw(scores)[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Ends each sequence of the batch on its own."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    @override
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor(self._run.take(), device=input_ids.device)


class _Handover(BaseStreamer):
    """Receives the tokens of each step, [batch]."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    @override
    def put(self, value: Any) -> None:
        if value.dim() == 1:  # the first call brings the prompts, [batch, tokens]
            self._run.hand_over()

    @override
    def end(self) -> None:
        pass
