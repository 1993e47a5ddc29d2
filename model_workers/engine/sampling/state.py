"""The sampling state of one sequence, and the positions to draw next. No tensors."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model_workers.constraints import MatcherError, TokenMatcher
from model_workers.engine.protocol import Sampling, SequenceSpec

TEMPERATURE_MIN: Final = 1e-5
"""Temperature below which a sequence is greedy: float32 leaves only the most probable token."""


@dataclass(frozen=True, slots=True)
class SamplingPosition:
    """A position for which a token is drawn: everything that the draw depends on beside the logits.

    Attributes:
        index: Index of the token in the answer.
        plain: Whether only the most probable token is needed.
        counts: How often the answer has each token of prompt and answer, if there are penalties.
        allowed: Set if there is a constraint; see `TokenMatcher.mask`.
        error: One sentence if nothing can be drawn here.
    """

    sampling: Sampling
    index: int
    plain: bool
    counts: Counter[int] | None = None
    allowed: NDArray[np.int32] | None = None
    error: str = ""

    @property
    def ruled_out(self) -> frozenset[int]:
        """Stop tokens that are excluded because the answer is too short to end."""
        too_short = self.index < self.sampling.min_tokens
        return self.sampling.stop_token_ids if too_short else frozenset()


def is_greedy(sampling: Sampling) -> bool:
    """Return whether no random number is needed."""
    return sampling.temperature < TEMPERATURE_MIN


class SamplingState:
    """The sampling state of one sequence: what it has drawn, as far as later draws depend on it. See `Sampler.open`."""

    __slots__ = ("_always_plain", "_counts", "_index", "_matcher", "_sampling")

    def __init__(self, spec: SequenceSpec, matcher: TokenMatcher | None) -> None:
        self._sampling = s = spec.sampling
        self._index = len(spec.produced)
        self._matcher = matcher
        penalized = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        self._counts: Counter[int] | None = None
        """How often the answer has each token; the prompt's are there with 0."""
        if penalized:
            self._counts = Counter(dict.fromkeys(spec.prompt, 0))
            self._counts.update(spec.produced)
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
        return self._matcher is not None or self._counts is not None

    @property
    def is_plain(self) -> bool:
        """Whether only the most probable token is needed next."""
        return self._always_plain and self._index >= self._sampling.min_tokens

    def positions(self, drafted: Sequence[int]) -> Iterator[SamplingPosition]:
        """Yield the position after the sequence's last token, then one after each drafted token."""
        sampling = self._sampling
        for offset, (allowed, error) in enumerate(self._masks(drafted)):
            index, counts = self._index + offset, self._counts
            if counts is not None and offset:
                counts = counts.copy()
                counts.update(drafted[:offset])
            plain = self._always_plain and index >= sampling.min_tokens
            yield SamplingPosition(sampling, index, plain, counts, allowed, error)

    def begin(self) -> None:
        """Count a token that is being drawn: the next draw may begin before `take`."""
        self._index += 1

    def take(self, token_ids: Sequence[int]) -> None:
        """Append the tokens of one draw, for which `begin` was called.

        Raises:
            MatcherError: What follows them cannot be constrained; the sequence ends there.
        """
        self._index += len(token_ids) - 1
        if self._counts is not None:
            self._counts.update(token_ids)
        if self._matcher is not None:
            accepted = self._matcher.take(token_ids)
            assert accepted == len(token_ids), "only what the mask allows is drawn"

    def _masks(self, drafted: Sequence[int]) -> Iterator[tuple[NDArray[np.int32] | None, str]]:
        """Yield the mask of each position, or why there is none; stop after a draft that is not allowed."""
        if self._matcher is None:
            for _ in range(len(drafted) + 1):
                yield None, ""
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
