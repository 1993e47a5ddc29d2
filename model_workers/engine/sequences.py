"""Sequences inside an engine: states, tokens and ends, and the index by request."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from model_workers.engine.blocks import BlockTable
from model_workers.engine.protocol import SequenceEnd, SequenceSpec, SequenceStep, TokenLogprobs
from sluice.errors import InvalidRequest, Overloaded, PromptTooLong
from sluice.settings import ModelSettings

if TYPE_CHECKING:
    from model_workers.engine.sampling.state import SamplingState


class SequenceState(Enum):
    """State of a sequence. Only a RUNNING one holds blocks of the cache."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    ENDED = auto()


class Sequence:
    """A sequence with the tokens it has so far.

    Attributes:
        urgency: (rank, arrival); the smallest goes first.
        tokens: Prompt and answer, tokens of earlier attempts included.
        prompt_tokens: Length of the prompt.
        computed: Leading tokens whose keys and values are in the cache.
        drafted: As `computed`, for the cache of the draft model; 0 without one.
        table: Its blocks of the cache.
        sampling: The sampler's state; None in an engine that does not sample.
        cached_tokens: Prompt tokens that were in the prefix cache when the sequence first joined a
            step.
        cancelled: Whether the caller has cancelled it.
        expecting: Whether the last of `tokens` is still being drawn; its place in the draw stands
            for it until `take`.
        scored: Tokens whose log-probabilities are wanted: those after the last positions of the
            prompt.
        alternatives: Number of most probable tokens wanted at each of these positions.
        scores: By step, the log-probabilities of `scored`, the most probable tokens and their log-probabilities.
    """

    def __init__(self, spec: SequenceSpec, context_tokens: int, arrival: int = 0) -> None:
        self.spec = spec
        self.state = SequenceState.WAITING
        self.urgency = (spec.rank, arrival)
        self.tokens = [*spec.prompt, *spec.produced]
        self.computed = 0
        self.drafted = 0
        self.table = BlockTable(spec.tenant)
        self.sampling: SamplingState | None = None
        self.cached_tokens: int | None = None
        self.cancelled = False
        self.expecting = False
        self.scored = () if spec.values is None else spec.values.scored_token_ids
        self.alternatives = 0 if spec.values is None else spec.values.scored_alternatives
        self.scores: list[tuple[list[float], list[int], list[float]]] = []
        self.prompt_tokens = len(spec.prompt)
        self._tokens_max = min(len(spec.prompt) + spec.sampling.max_tokens, context_tokens)

    @property
    def pending(self) -> int:
        """Tokens that are still to be computed: 1 while the sequence decodes."""
        return len(self.tokens) - self.computed

    @property
    def room(self) -> int:
        """Tokens that may still be drawn."""
        return self._tokens_max - len(self.tokens)

    @property
    def full(self) -> bool:
        """Whether the token that is being drawn is the last one that may be."""
        return self.expecting and self.room <= 0

    @property
    def answered(self) -> int:
        """Number of known answer tokens, which is the index of the next one."""
        return len(self.tokens) - self.prompt_tokens - self.expecting

    @property
    def answer(self) -> tuple[int, ...]:
        """The known tokens of the answer."""
        return tuple(self.tokens[self.prompt_tokens : self.prompt_tokens + self.answered])

    @property
    def scored_from(self) -> int:
        """The first position whose logits are wanted."""
        return len(self.tokens) - len(self.scored)

    @property
    def sharable(self) -> list[int]:
        """The tokens that may come from the prefix cache: wanted logits exist only for positions that are computed."""
        return self.tokens[: self.scored_from + 1] if self.scored else self.tokens

    def end_now(self, now: float) -> SequenceEnd | None:
        """Return why the sequence must not be computed any further; None: it may continue."""
        if self.cancelled:
            return SequenceEnd.CANCELLED
        if self.spec.deadline is not None and now >= self.spec.deadline:
            return SequenceEnd.DEADLINE
        return self.end_by_tokens()

    def end_by_tokens(self) -> SequenceEnd | None:
        """Return why the answer is complete, also for a resumed sequence that lacks only its end; None: it is not."""
        if self.expecting:
            return None
        if self.answered and self.tokens[-1] in self.spec.sampling.stop_token_ids:
            return SequenceEnd.STOP
        return SequenceEnd.LENGTH if self.room <= 0 else None

    def expect(self, place: int) -> None:
        """Record that the next token is being drawn, at index `place` of its draw; see `PagedModel.feed`."""
        assert not self.expecting
        self.tokens.append(-1 - place)
        self.expecting = True

    def take(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> SequenceStep:
        """Append the tokens of a step and return the step."""
        # The placeholder of `expect` makes way for the token.
        if self.expecting:
            self.tokens.pop()
            self.expecting = False
        index = self.answered
        self.tokens.extend(token_ids)
        return self._step(index, token_ids, logprobs, self.end_by_tokens(), "")

    def end_with(self, values: bytes) -> SequenceStep:
        """Return the last step of a sequence whose result is `values`."""
        return replace(self.end_step(SequenceEnd.STOP), values=values)

    def end_step(self, end: SequenceEnd, error: str = "") -> SequenceStep:
        """Return a last step without tokens."""
        return self._step(self.answered, (), (), end, error)

    def _step(
        self,
        index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        end: SequenceEnd | None,
        error: str,
    ) -> SequenceStep:
        spec = self.spec
        return SequenceStep(
            request_id=spec.request_id,
            owner=spec.owner,
            attempt=spec.attempt,
            start_index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            end=end,
            error=error,
            cached_prompt_tokens=self.cached_tokens or 0,
            delay_s=spec.delay_s(index, end),
        )


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits on number and length of an engine's sequences.

    Attributes:
        slots: Maximum number of running sequences.
        max_waiting: How many more than `slots` sequences the engine accepts.
        context_tokens: Maximum length of a sequence.
        prefill_tokens: Maximum number of prompt tokens in a step.
        vocab_size: Number of the model's tokens; 0: not known here.
    """

    slots: int
    max_waiting: int
    context_tokens: int
    prefill_tokens: int
    vocab_size: int = 0

    @classmethod
    def of(cls, settings: ModelSettings, context_tokens: int) -> "SequenceLimits":
        """Return the limits of a model's settings."""
        return cls(
            settings.slots, settings.max_waiting_rows, context_tokens, settings.prefill_tokens
        )


class RequestIndex:
    """The newest sequence of every request: admission, cancels and deadlines."""

    def __init__(self, limits: SequenceLimits) -> None:
        self._limits = limits
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._scan_at = math.inf

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def add(self, spec: SequenceSpec) -> tuple[Sequence, Sequence | None]:
        """Add a sequence; return it and the one of a lower attempt that it replaces. See `Engine.add`."""
        old = self._sequences.get(spec.request_id)
        check_sequence(spec, None if old is None else old.spec.attempt, len(self), self._limits)
        sequence = Sequence(spec, self._limits.context_tokens, self._arrivals)
        self._arrivals += 1
        self._sequences[spec.request_id] = sequence
        # A resumed sequence may lack nothing but its end: find it with the next sweep.
        if sequence.end_by_tokens() is not None:
            self._scan_at = -math.inf
        elif spec.deadline is not None:
            self._scan_at = min(self._scan_at, spec.deadline)
        return sequence, old

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended; ignored if a newer attempt has replaced it."""
        if self._sequences.get(sequence.spec.request_id) is sequence:
            del self._sequences[sequence.spec.request_id]

    def cancel(self, request_ids: Collection[str]) -> None:
        """Mark sequences as cancelled; unknown ones are ignored."""
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                sequence.cancelled = True
                self._scan_at = -math.inf

    def due(self, now: float) -> list[tuple[Sequence, SequenceEnd]]:
        """Return the sequences that must not be computed any further, and why; scan only when one may be due."""
        # Nothing can be due yet: the common case, once a step.
        if now < self._scan_at:
            return []
        ended = [(sequence, end) for sequence in self if (end := sequence.end_now(now)) is not None]
        ended_sequences = {sequence for sequence, _ in ended}
        deadlines = (sequence.spec.deadline for sequence in self if sequence not in ended_sequences)
        self._scan_at = min((d for d in deadlines if d is not None), default=math.inf)
        return ended


def check_sequence(
    spec: SequenceSpec, older: int | None, sequences: int, limits: SequenceLimits
) -> None:
    """Raise an error for a sequence that an engine refuses.

    - `older`: Attempt number of the same request in the engine; None: it is not there.
    - `sequences`: Number of sequences in the engine.

    Raises:
        SluiceError: See `Engine.add`.
    """
    scored = () if spec.values is None else spec.values.scored_token_ids
    if limits.vocab_size and max((*spec.prompt, *spec.produced, *scored)) >= limits.vocab_size:
        raise InvalidRequest(f"a token is not one of the model's {limits.vocab_size}")
    if older is not None and spec.attempt <= older:
        raise InvalidRequest(f"attempt {older} of this request is here already")
    if len(spec.prompt) >= limits.context_tokens:
        raise PromptTooLong(
            f"a prompt of {len(spec.prompt)} tokens leaves no room for an answer "
            f"in a context of {limits.context_tokens}"
        )
    if older is None and sequences >= limits.slots + limits.max_waiting:
        raise Overloaded(f"the engine is full: {sequences} sequences run or wait")
