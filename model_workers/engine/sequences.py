"""Sequences inside an engine: states, tokens and end conditions, and the index by request."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from model_workers.engine.blocks import BlockTable
from model_workers.engine.protocol import (
    EngineFull,
    RowStale,
    RowTooLong,
    SequenceEnd,
    SequenceSpec,
    SequenceStep,
    TokenLogprobs,
)
from sluice.settings import ModelSettings

if TYPE_CHECKING:
    from model_workers.engine.sampling.state import SamplingState


class SequenceState(Enum):
    """The state of a sequence. Only a RUNNING sequence holds blocks of the cache."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    ENDED = auto()


MOVES: Final[Mapping[SequenceState, frozenset[SequenceState]]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.ENDED}),
    SequenceState.RUNNING: frozenset({SequenceState.PREEMPTED, SequenceState.ENDED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.RUNNING, SequenceState.ENDED}),
    SequenceState.ENDED: frozenset(),
}
"""The legal moves."""


class Sequence:
    """A sequence with the tokens it has so far.

    Attributes:
        urgency: (rank, arrival): the smallest goes first.
        tokens: prompt and answer, tokens of earlier attempts included.
        computed: tokens at the front whose keys and values are in the cache.
        drafted: as `computed`, in the cache of the draft model; 0 without one.
        table: its blocks of the cache.
        sampling: the sampler's state of the sequence; None in an engine that does not sample.
        cached_tokens: tokens of the prompt that were in the prefix cache when the sequence first joined a step.
        cancelled: by the caller.
        expecting: the last of `tokens` is being drawn: until `take` its place in the draw stands for it.
        scored: tokens whose log-probabilities are wanted: those after the last positions of the prompt.
        scores: of these, as far as they are computed.
        alternatives: how many of the most probable tokens are wanted at each of their places.
        best_ids: these, place by place.
        best_scores: their log-probabilities.
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
        self.scores = [0.0] * len(self.scored)
        self.alternatives = 0 if spec.values is None else spec.values.scored_alternatives
        self.best_ids = [0] * (self.alternatives * len(self.scored))
        self.best_scores = [0.0] * len(self.best_ids)
        self._prompt_tokens = len(spec.prompt)
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
        """Whether the token that is being drawn is the last one there is room for."""
        return self.expecting and self.room <= 0

    @property
    def answered(self) -> int:
        """Tokens of the answer that are known: the index of the next one."""
        return len(self.tokens) - self._prompt_tokens - self.expecting

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens of the answer that are known."""
        return tuple(self.tokens[self._prompt_tokens : self._prompt_tokens + self.answered])

    @property
    def scored_from(self) -> int:
        """The first position whose logits are wanted."""
        return len(self.tokens) - len(self.scored)

    @property
    def sharable(self) -> list[int]:
        """The tokens that the prefix cache may have: logits of a position are there only when it is computed."""
        return self.tokens[: self.scored_from + 1] if self.scored else self.tokens

    def note_cached(self) -> None:
        """Before the first step only the prefix cache can have computed anything; later it may be the sequence itself."""
        if self.cached_tokens is None:
            self.cached_tokens = min(self.computed, self._prompt_tokens)

    def move(self, state: SequenceState) -> None:
        """Changes the state."""
        assert state in MOVES[self.state], f"a sequence cannot go from {self.state} to {state}"
        self.state = state

    def end_now(self, now: float) -> SequenceEnd | None:
        """Why the sequence must not be computed any further, if so."""
        if self.cancelled:
            return SequenceEnd.CANCELLED
        if self.spec.deadline is not None and now >= self.spec.deadline:
            return SequenceEnd.DEADLINE
        return self.end_by_tokens()

    def end_by_tokens(self) -> SequenceEnd | None:
        """Why the answer so far is complete, if so: also of a resumed sequence that lacks only its end."""
        if self.expecting:
            return None
        if self.answered and self.tokens[-1] in self.spec.sampling.stop_token_ids:
            return SequenceEnd.STOP
        return SequenceEnd.LENGTH if self.room <= 0 else None

    def expect(self, place: int) -> None:
        """A token is being drawn, the one at ``place`` of its draw; see `PagedModel.feed`."""
        assert not self.expecting
        self.tokens.append(-1 - place)
        self.expecting = True

    def take(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> SequenceStep:
        """Appends the tokens of a step, and reports them."""
        if self.expecting:
            self.tokens.pop()
            self.expecting = False
        index = self.answered
        self.tokens.extend(token_ids)
        return self._step(index, token_ids, logprobs, self.end_by_tokens(), "")

    def end_with(self, values: bytes) -> SequenceStep:
        """The report of the numbers that were wanted, which end the sequence."""
        return replace(self.end_step(SequenceEnd.STOP), values=values)

    def end_step(self, end: SequenceEnd, error: str = "") -> SequenceStep:
        """The report of an end without a token."""
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
            wait_s=spec.wait_s(index, end),
        )


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits on number and length of an engine's sequences.

    Attributes:
        slots: most sequences that run at once.
        max_waiting: sequences that may wait beside those.
        context_tokens: longest sequence.
        prefill_tokens: most tokens of prompts in a step.
    """

    slots: int
    max_waiting: int
    context_tokens: int
    prefill_tokens: int

    @classmethod
    def of(cls, settings: ModelSettings, context_tokens: int) -> "SequenceLimits":
        """Those of a model's settings."""
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
        """A new sequence, and the one of a lower attempt that it replaces; see `Engine.add`."""
        old = self._sequences.get(spec.request_id)
        check_sequence(spec, None if old is None else old.spec.attempt, len(self), self._limits)
        sequence = Sequence(spec, self._limits.context_tokens, self._arrivals)
        self._arrivals += 1
        self._sequences[spec.request_id] = sequence
        if sequence.end_by_tokens() is not None:
            self._scan_at = -math.inf
        elif spec.deadline is not None:
            self._scan_at = min(self._scan_at, spec.deadline)
        return sequence, old

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if self._sequences.get(sequence.spec.request_id) is sequence:
            del self._sequences[sequence.spec.request_id]

    def cancel(self, request_ids: Collection[str]) -> None:
        """Marks sequences; unknown ones are ignored."""
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                sequence.cancelled = True
                self._scan_at = -math.inf

    def due(self, now: float) -> list[tuple[Sequence, SequenceEnd]]:
        """Sequences that must not be computed any further, and why. Sequences are scanned only when one may be due."""
        if now < self._scan_at:
            return []
        ended = [(sequence, end) for sequence in self if (end := sequence.end_now(now)) is not None]
        gone = {sequence for sequence, _ in ended}
        deadlines = (sequence.spec.deadline for sequence in self if sequence not in gone)
        self._scan_at = min((d for d in deadlines if d is not None), default=math.inf)
        return ended


def check_sequence(
    spec: SequenceSpec, older: int | None, sequences: int, limits: SequenceLimits
) -> None:
    """Refuses a sequence that an engine with ``sequences`` does not take; ``older``: the attempt of its request that is here.

    Raises:
        Refused: see `Engine.add`.
    """
    if older is not None and spec.attempt <= older:
        raise RowStale(f"attempt {older} of this request is here already")
    if len(spec.prompt) >= limits.context_tokens:
        raise RowTooLong(
            f"a prompt of {len(spec.prompt)} tokens leaves no room for an answer "
            f"in a context of {limits.context_tokens}"
        )
    if older is None and sequences >= limits.slots + limits.max_waiting:
        raise EngineFull(f"all {sequences} places for sequences are taken")
