"""What sampling remembers of one row."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from model_workers.engine.protocol import RowSpec
from model_workers.engine.sampling.matcher import Matcher, MatcherError
from model_workers.engine.sampling.occurrences import Occurrences
from model_workers.engine.sampling.position import Position, is_greedy


class RowDraws:
    """The draws of one row: where it is, and what the next one depends on. Made by `Sampler.open`."""

    __slots__ = ("_always_plain", "_index", "_matcher", "_occurrences", "_sampling")

    def __init__(self, spec: RowSpec, matcher: Matcher | None) -> None:
        self._sampling = s = spec.sampling
        self._index = len(spec.produced)
        self._matcher = matcher
        penalised = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        self._occurrences = Occurrences(spec.prompt, spec.produced) if penalised else None
        changed = penalised or matcher is not None or s.logprobs
        self._always_plain = is_greedy(s) and not changed

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end the row."""
        return self._sampling.stop_token_ids

    @property
    def is_plain(self) -> bool:
        """Whether the most probable token is all that is asked for next."""
        return self._always_plain and self._index >= self._sampling.min_tokens

    def positions(self, drafted: Sequence[int]) -> Iterator[Position]:
        """The place behind the row's last token, then one behind each drafted token."""
        if self._always_plain:
            yield from (self._plain(i) for i in range(len(drafted) + 1))
            return
        for i, (allowed, error) in enumerate(self._masks(drafted)):
            behind = self._occurrences and self._occurrences.behind(drafted[:i])
            yield Position(self._sampling, self._index + i, False, behind, allowed, error)

    def take(self, token_ids: Sequence[int]) -> None:
        """Goes on behind ``token_ids``.

        Raises:
            MatcherError: what comes behind them cannot be constrained; the row ends there.
        """
        self._index += len(token_ids)
        if self._occurrences is not None:
            self._occurrences.add(token_ids)
        if self._matcher is not None:
            taken = self._matcher.take(token_ids)
            assert taken == len(token_ids), "only what the mask allows is drawn"

    def _plain(self, offset: int) -> Position:
        index = self._index + offset
        return Position(self._sampling, index, index >= self._sampling.min_tokens)

    def _masks(self, drafted: Sequence[int]) -> Iterator[tuple[NDArray[np.int32] | None, str]]:
        """The mask of each place, or why there is none. Behind a draft that may not come nothing is drawn any more."""
        if self._matcher is None:
            yield from ((None, "") for _ in range(len(drafted) + 1))
            return
        taken, error = 0, ""
        for i in range(len(drafted) + 1):
            mask = None
            try:
                mask = self._matcher.mask() if taken == i and not error else None
                taken += self._matcher.take(drafted[i : i + 1]) if mask is not None else 0
            except MatcherError as reason:
                error = str(reason)
            yield mask, error if mask is None else ""
        self._matcher.give_back(taken)
