"""The sampling state of one sequence: token counts for penalties, the constraint, and the positions to draw next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model_workers.constraints import MatcherError, TokenMatcher
from model_workers.engine.protocol import Sampling, SequenceSpec

TEMPERATURE_MIN: Final = 1e-5
"""Temperature below which a sequence is greedy: float32 leaves only the most probable token."""


class TokenCounts:
    """The distinct tokens of prompt and answer, and how often the answer has each.

    Two short arrays instead of a column over the vocabulary: a step touches only the sequence's distinct tokens, and a
    sequence takes no memory on the device.
    """

    def __init__(self, prompt: Sequence[int], produced: Sequence[int]) -> None:
        first = dict.fromkeys(prompt)
        self._places = {token_id: place for place, token_id in enumerate(first)}
        self._tokens = np.fromiter(first, np.int64, len(first))
        self._counts = np.zeros(len(first), np.int64)
        self.add(produced)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Each token once, in order of first occurrence."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often the answer has each of `tokens`; 0 for those only in the prompt."""
        return self._counts[: len(self._places)]

    def add(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the answer."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._tokens):
                self._grow()
            self._tokens[place] = token_id
            self._counts[place] += 1

    def after(self, token_ids: Sequence[int]) -> "TokenCounts":
        """Return the counts after `token_ids`; itself if there are none."""
        if not token_ids:
            return self
        copy = TokenCounts((), ())
        copy._places = dict(self._places)
        copy._tokens, copy._counts = self._tokens.copy(), self._counts.copy()
        copy.add(token_ids)
        return copy

    def _grow(self) -> None:
        more = max(16, len(self._tokens))
        self._tokens = np.concatenate([self._tokens, np.zeros(more, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])


@dataclass(frozen=True, slots=True)
class SamplingPosition:
    """A position for which a token is drawn: everything that the draw depends on beside the logits.

    Attributes:
        index: Index of the token in the answer.
        plain: Whether only the most probable token is needed.
        token_counts: Set if there are penalties.
        allowed: Set if there is a constraint; see `TokenMatcher.mask`.
        error: One sentence if nothing can be drawn here.
    """

    sampling: Sampling
    index: int
    plain: bool
    token_counts: TokenCounts | None = None
    allowed: NDArray[np.int32] | None = None
    error: str = ""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, whatever changes the logits before."""
        return is_greedy(self.sampling)

    @property
    def ruled_out(self) -> frozenset[int]:
        """Stop tokens that are excluded because the answer is too short to end."""
        too_short = self.index < self.sampling.min_tokens
        return self.sampling.stop_token_ids if too_short else frozenset()


def is_greedy(sampling: Sampling) -> bool:
    """Return whether no random number is needed."""
    return sampling.temperature < TEMPERATURE_MIN


class SamplingState:
    """The state of one sequence; see `Sampler.open`."""

    __slots__ = ("_always_plain", "_index", "_matcher", "_sampling", "_token_counts")

    def __init__(self, spec: SequenceSpec, matcher: TokenMatcher | None) -> None:
        self._sampling = s = spec.sampling
        self._index = len(spec.produced)
        self._matcher = matcher
        penalized = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        self._token_counts = TokenCounts(spec.prompt, spec.produced) if penalized else None
        changed = penalized or matcher is not None or s.logprobs or s.logit_bias
        self._always_plain = is_greedy(s) and not changed

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end the sequence."""
        return self._sampling.stop_token_ids

    @property
    def constraint_field(self) -> str:
        """Path of the constraint's field; see `Sampling.constraint_field`."""
        return self._sampling.constraint_field

    @property
    def reads_tokens(self) -> bool:
        """Whether a draw depends on the tokens drawn before, and not only on their number."""
        return self._matcher is not None or self._token_counts is not None

    @property
    def is_plain(self) -> bool:
        """Whether only the most probable token is needed next."""
        return self._always_plain and self._index >= self._sampling.min_tokens

    def positions(self, drafted: Sequence[int]) -> Iterator[SamplingPosition]:
        """Yield the position after the sequence's last token, then one after each drafted token."""
        if self._always_plain:
            yield from (self._plain(i) for i in range(len(drafted) + 1))
            return
        for i, (allowed, error) in enumerate(self._masks(drafted)):
            counts = self._token_counts and self._token_counts.after(drafted[:i])
            yield SamplingPosition(self._sampling, self._index + i, False, counts, allowed, error)

    def begin(self) -> None:
        """Count a token that is being drawn: the next draw may begin before `take`."""
        self._index += 1

    def take(self, token_ids: Sequence[int]) -> None:
        """Append the tokens of one draw.

        Raises:
            MatcherError: What follows them cannot be constrained; the sequence ends there.
        """
        self._index += len(token_ids) - 1
        if self._token_counts is not None:
            self._token_counts.add(token_ids)
        if self._matcher is not None:
            accepted = self._matcher.take(token_ids)
            assert accepted == len(token_ids), "only what the mask allows is drawn"

    def _plain(self, offset: int) -> SamplingPosition:
        index = self._index + offset
        return SamplingPosition(self._sampling, index, index >= self._sampling.min_tokens)

    def _masks(self, drafted: Sequence[int]) -> Iterator[tuple[NDArray[np.int32] | None, str]]:
        """Yield the mask of each position, or why there is none; stop after a draft that is not allowed."""
        if self._matcher is None:
            yield from ((None, "") for _ in range(len(drafted) + 1))
            return
        accepted, error = 0, ""
        for i in range(len(drafted) + 1):
            mask = None
            try:
                mask = self._matcher.mask() if accepted == i and not error else None
                accepted += self._matcher.take(drafted[i : i + 1]) if mask is not None else 0
            except MatcherError as reason:
                error = str(reason)
            yield mask, error if mask is None else ""
        self._matcher.give_back(accepted)
