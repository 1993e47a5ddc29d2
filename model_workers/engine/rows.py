"""One row inside an engine: its life cycle, its tokens and what ends it."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from model_workers.engine.blocks import BlockTable
from model_workers.engine.protocol import RowEnd, RowSpec, RowStep, TokenLogprobs

if TYPE_CHECKING:
    from model_workers.engine.sampling.row import RowDraws


class RowState(Enum):
    """Where a row is. Only a RUNNING row holds blocks of the cache."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    ENDED = auto()


MOVES: Final[Mapping[RowState, frozenset[RowState]]] = {
    RowState.WAITING: frozenset({RowState.RUNNING, RowState.ENDED}),
    RowState.RUNNING: frozenset({RowState.PREEMPTED, RowState.ENDED}),
    RowState.PREEMPTED: frozenset({RowState.RUNNING, RowState.ENDED}),
    RowState.ENDED: frozenset(),
}
"""The legal moves."""


class Row:
    """A row with the tokens it has so far.

    Attributes:
        urgency: (rank, arrival): the smallest goes first.
        tokens: prompt and answer, tokens of earlier attempts included.
        computed: tokens at the front whose keys and values are in the cache.
        drafted: as `computed`, in the cache of the model that drafts; 0 without one.
        table: where they are.
        draws: what the sampler remembers of the row; None in an engine that does not sample.
        cancelled: the caller wants no more.
    """

    def __init__(self, spec: RowSpec, context_tokens: int, arrival: int = 0) -> None:
        self.spec = spec
        self.state = RowState.WAITING
        self.urgency = (spec.rank, arrival)
        self.tokens = [*spec.prompt, *spec.produced]
        self.computed = 0
        self.drafted = 0
        self.table = BlockTable()
        self.draws: RowDraws | None = None
        self.cancelled = False
        self._prompt_tokens = len(spec.prompt)
        self._tokens_max = min(len(spec.prompt) + spec.sampling.max_tokens, context_tokens)

    @property
    def pending(self) -> int:
        """Tokens that are still to be computed: 1 while the row decodes."""
        return len(self.tokens) - self.computed

    @property
    def room(self) -> int:
        """Tokens that may still be drawn."""
        return self._tokens_max - len(self.tokens)

    @property
    def answered(self) -> int:
        """Tokens of the answer so far: the index of the next one."""
        return len(self.tokens) - self._prompt_tokens

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
        if self.answered and self.tokens[-1] in self.spec.sampling.stop_token_ids:
            return RowEnd.STOP
        return RowEnd.LENGTH if self.room <= 0 else None

    def take(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> RowStep:
        """Appends the tokens of a step, and reports them."""
        index = self.answered
        self.tokens.extend(token_ids)
        return self._step(index, token_ids, logprobs, self.end_by_tokens(), "")

    def closing(self, end: RowEnd, error: str = "") -> RowStep:
        """The report of an end without a token."""
        return self._step(self.answered, (), (), end, error)

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
