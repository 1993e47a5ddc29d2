"""One row inside an engine: its life cycle and what ends it."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from model_workers.engine.protocol import RowEnd, RowSpec, RowStep, TokenLogprobs


class RowState(Enum):
    """Where a row is."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    ENDED = auto()


MOVES: Final[Mapping[RowState, frozenset[RowState]]] = {
    RowState.WAITING: frozenset({RowState.PREFILL, RowState.ENDED}),
    RowState.PREFILL: frozenset({RowState.DECODE, RowState.ENDED}),
    RowState.DECODE: frozenset({RowState.ENDED}),
    RowState.ENDED: frozenset(),
}
"""The legal moves."""


class Row:
    """A row with the tokens it has so far.

    Attributes:
        tokens: the answer, tokens of earlier attempts included.
        cancelled: the caller wants no more.
        replaced: a higher attempt took its place: it ends without a word.
    """

    def __init__(self, spec: RowSpec, context_tokens: int) -> None:
        self.spec = spec
        self.state = RowState.WAITING
        self.tokens = list(spec.produced)
        self.cancelled = False
        self.replaced = False
        self._max_tokens = min(spec.sampling.max_tokens, context_tokens - len(spec.prompt))

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.spec.prompt) + len(self.tokens)

    def move(self, state: RowState) -> None:
        """Goes on to ``state``."""
        assert state in MOVES[self.state], f"a row cannot go from {self.state} to {state}"
        self.state = state

    def end_now(self, now: float) -> RowEnd | None:
        """Why the row must not be computed any further, if so."""
        if self.cancelled:
            return RowEnd.CANCELLED
        if self.spec.deadline is not None and now >= self.spec.deadline:
            return RowEnd.DEADLINE
        return self.end_by_tokens()

    def end_by_tokens(self) -> RowEnd | None:
        """Whether the tokens so far are a whole answer: also true of a resumed row that lacked only its end."""
        if self.tokens and self.tokens[-1] in self.spec.sampling.stop_token_ids:
            return RowEnd.STOP
        return RowEnd.LENGTH if len(self.tokens) >= self._max_tokens else None

    def take(self, token_id: int, logprobs: TokenLogprobs | None = None) -> RowStep:
        """Appends the token of a step, and reports it."""
        index = len(self.tokens)
        self.tokens.append(token_id)
        found = () if logprobs is None else (logprobs,)
        return self._step(index, (token_id,), found, self.end_by_tokens(), "")

    def closing(self, end: RowEnd, error: str = "") -> RowStep:
        """The report of an end without a token."""
        return self._step(len(self.tokens), (), (), end, error)

    def _step(
        self,
        index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        end: RowEnd | None,
        error: str,
    ) -> RowStep:
        spec = self.spec
        return RowStep(
            spec.request_id, spec.owner, spec.attempt, index, token_ids, logprobs, end, error
        )
