"""The engine that computes whole padded batches through transformers' `generate()`.

Sequences wait until no batch runs. Then the most urgent one begins the next batch:

1. Sequences of one batch of the batcher stay together: its policy chose them.
2. Other waiting sequences join if they are about as long, so that they add little padding.
3. A batch has at most `slots` sequences, and at most as many cells of the KV cache as `slots` sequences of the context
   length.

Nothing joins a running batch. A step computes one token of each of its sequences.
"""

import bisect
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Final

import torch
from typing_extensions import override

from model_workers.engine.generate.model import GenerateModel
from model_workers.engine.generate.run import BatchRun
from model_workers.engine.generation_config import limit_sides
from model_workers.engine.protocol import Engine, SequenceEnd, SequenceSpec, SequenceStep
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sampling.state import SamplingState
from model_workers.engine.sequences import RequestIndex, Sequence, SequenceLimits, SequenceState
from sluice.errors import InvalidRequest
from sluice.internal.v1.worker_pb2 import WorkerLoad
from sluice.settings.models import SideLimits

logger = logging.getLogger(__name__)

JOIN_SHARE: Final = 0.8
"""Minimum length of a sequence that joins another batch, as a share of that batch's longest sequence."""


class GenerateEngine(Engine):
    """An engine of whole batches; see `Engine` and the module."""

    def __init__(
        self,
        model: GenerateModel,
        sampler: Sampler,
        limits: SequenceLimits,
        sides: SideLimits | None = None,
    ) -> None:
        """Create an engine; `sides` are the limits of an encoder-decoder."""
        self.sampler = sampler
        self._model = model
        self._limits = replace(limits, vocab_size=model.vocab_size)
        self._sides = sides
        self._sequences = RequestIndex(self._limits)
        self._waiting: list[Sequence] = []
        self._suspects: list[Sequence] = []
        """Sequences of a batch that failed as a whole; they run first, one at a time."""
        self._run: BatchRun | None = None
        self._ends: list[SequenceStep] = []
        """Ends of the current step; kept if the step raises."""
        self._has_computed = False
        """Whether sequences of the present batch got tokens, also before it was split."""
        self._steps = 0

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        if sequence.values is not None:
            raise InvalidRequest("this model gives answers, and no embeddings or scores")
        if sequence.audio is not None:
            raise InvalidRequest("this model takes text and no audio")
        self._model.check(sequence)
        if self._sides is not None:
            sequence = limit_sides(sequence, self._sides, len(self._model.prefix))
        sampling = self._open(sequence)
        added, replaced = self._sequences.add(sequence)
        if replaced is not None:
            self._leave(replaced)
        added.sampling = sampling
        bisect.insort(self._waiting, added, key=lambda other: other.urgency)

    def _open(self, sequence: SequenceSpec) -> SamplingState:
        # Penalties of an encoder-decoder are about what its decoder has said, as in transformers.
        return self.sampler.open(sequence if self._sides is None else replace(sequence, prompt=()))

    @override
    def cancel(self, request_ids: Collection[str]) -> None:
        self._sequences.cancel(request_ids)

    @override
    def step(self, now: float) -> list[SequenceStep]:
        self._steps += 1
        for sequence, end in self._sequences.due(now):
            self._leave(sequence)
            self._ends.append(sequence.end_step(end))
        if self._run is None and self._sequences:
            self._run = BatchRun(self._model, self.sampler, self._next_batch())
        steps = [] if self._run is None else self._advance(self._run)
        ends, self._ends = self._ends, []
        return ends + steps

    def _advance(self, run: BatchRun) -> list[SequenceStep]:
        """Compute a token of each sequence of the batch."""
        try:
            results = run.advance()
        except Exception as error:
            self._run = None
            return self._split_up(list(run.live.values()), error)
        self._has_computed = True
        for sequence, step in results:
            if step.end is not None:
                self._leave(sequence)
        return [step for _, step in results]

    def _split_up(self, sequences: list[Sequence], error: Exception) -> list[SequenceStep]:
        """Compute the sequences of a failed batch one by one, so that only the faulty one fails; return its end.

        Raises:
            Exception: `error`, if a sequence fails alone and nothing of its batch was computed: the worker may be
                faulty.
        """
        if len(sequences) > 1:
            logger.warning("split a failed batch of %d sequences: %r", len(sequences), error)
            for sequence in sequences:
                sequence.state = SequenceState.PREEMPTED
                sequence.sampling = self._open(replace(sequence.spec, produced=sequence.answer))
            self._suspects += sequences
            return []
        (sequence,) = sequences
        if not self._has_computed:
            raise error
        logger.warning("request %s failed: %r", sequence.spec.request_id, error)
        self._leave(sequence)
        lacks_memory = isinstance(error, torch.OutOfMemoryError)
        end = SequenceEnd.RETURNED if lacks_memory else SequenceEnd.FAILED
        return [sequence.end_step(end, f"the engine failed: {type(error).__name__}")]

    def _next_batch(self) -> list[Sequence]:
        batch = [self._suspects.pop(0)] if self._suspects else self._form()
        for sequence in batch:
            sequence.state = SequenceState.RUNNING
        return batch

    def _form(self) -> list[Sequence]:
        """Remove and return the sequences of the next batch; see the module."""
        self._has_computed = False
        first = self._waiting[0]
        group, name = self._model.group(first), first.spec.batch
        able = [sequence for sequence in self._waiting if self._model.group(sequence) == group]
        batch: list[Sequence] = []
        for sequence in (sequence for sequence in able if sequence.spec.batch == name):
            if self._fits([*batch, sequence]):
                batch.append(sequence)
        longest = max(len(sequence.tokens) for sequence in batch)
        for sequence in able:
            is_alike = JOIN_SHARE * longest <= len(sequence.tokens) <= longest
            if is_alike and sequence.spec.batch != name and self._fits([*batch, sequence]):
                batch.append(sequence)
        for sequence in batch:
            self._waiting.remove(sequence)
        return batch

    def _fits(self, batch: list[Sequence]) -> bool:
        if len(batch) == 1:
            return True
        longest = max(len(sequence.tokens) for sequence in batch)
        columns = longest + max(sequence.room for sequence in batch)
        cells = self._limits.slots * self._limits.context_tokens
        return len(batch) <= self._limits.slots and len(batch) * columns <= cells

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence, wherever it is."""
        for sequences in (self._waiting, self._suspects):
            if sequence in sequences:
                sequences.remove(sequence)
        sequence.state = SequenceState.ENDED
        self._sequences.remove(sequence)
        if self._run is not None:
            self._run.drop(sequence)
            if not self._run.live:
                self._run.stop()
                self._run = None

    @override
    def abort(self, message: str) -> list[SequenceStep]:
        ends, self._ends = self._ends, []
        for sequence in list(self._sequences):
            self._leave(sequence)
            ends.append(sequence.end_step(SequenceEnd.RETURNED, message))
        return ends

    @override
    def has_sequences(self) -> bool:
        return len(self._sequences) > 0

    @override
    def load(self) -> WorkerLoad:
        running = [] if self._run is None else list(self._run.live.values())
        waiting = [*self._waiting, *self._suspects]
        return WorkerLoad(
            slots=self._limits.slots,
            running=len(running),
            waiting=len(waiting),
            context_tokens=self._limits.context_tokens,
            steps=self._steps,
            running_tokens=sum(len(sequence.tokens) for sequence in running),
            waiting_tokens=sum(len(sequence.tokens) for sequence in waiting),
            max_tasks=self._limits.slots + self._limits.max_waiting,
            batch_running=bool(running),
        )
