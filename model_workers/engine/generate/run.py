"""One padded batch inside transformers' `generate()`, on a thread of its own.

That thread and the engine's thread take turns: `BatchRun.advance` lets `generate()` compute one token of each sequence
and waits for it. So only one of the two ever touches the sequences, and one token is one step of the engine. In each
turn `generate()` calls `_Draw`, a logits processor: our sampler draws by (seed, position), sequences get their tokens,
the step is handed over, and the thread waits for the next turn. Then greedy decoding takes the drawn tokens.
"""

from collections import abc
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from typing_extensions import override

from model_workers.engine.generate.model import GenerateModel
from model_workers.engine.protocol import SequenceEnd, SequenceStep
from model_workers.engine.sampling.sampler import DrawRequest, Sampler
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
        """Draw nothing more for a sequence that has ended; its row in the batch becomes padding."""
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
            )
            raise RuntimeError("generate() ended before its sequences did")
        except _Stopped:
            pass
        except BaseException as error:
            self._results.put(error)

    def _wait(self) -> None:
        if not self._turns.get():
            raise _Stopped

    def turn(self, logits: Tensor) -> Tensor:
        """Give each live sequence its next token, and hand the step over; return the tokens of all sequences."""
        places, sequences = list(self.live), list(self.live.values())
        states = [sequence.sampling for sequence in sequences]
        chosen = logits[places]
        self._model.restrict(sequences, chosen)
        requests = [DrawRequest(state) for state in states if state is not None]
        tokens = torch.full(logits.shape[:1], self._model.pad, device=logits.device)
        steps = []
        results = self._sampler.draw(chosen, requests)
        for place, sequence, drawn in zip(places, sequences, results, strict=True):
            step = sequence.take(drawn.token_ids, drawn.logprobs)
            if drawn.error:
                step = replace(step, end=SequenceEnd.FAILED, error=drawn.error)
            if step.end is not None:
                del self.live[place]
            else:
                tokens[place] = drawn.token_ids[0]
            steps.append((sequence, step))
        # The steps are the other thread's from here on, and so is `live`.
        is_over = not self.live
        self._results.put(steps)
        if is_over:
            raise _Stopped
        self._wait()
        return tokens


class _Draw(LogitsProcessor):
    """Makes every token of a sequence impossible but the one that our sampler draws."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    @override
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        only = torch.full_like(scores, -torch.inf)
        return only.scatter_(1, self._run.turn(scores)[:, None], 0.0)
