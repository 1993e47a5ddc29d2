"""The seam to constrained decoding: which tokens an answer may go on with."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model_workers.engine.protocol import Sampling


class MatcherError(Exception):
    """A matcher cannot go on; the message says why in one sentence."""


class Matcher(Protocol):
    """What one answer may still become. Owned by its row."""

    def mask(self) -> NDArray[np.int32]:
        """Which tokens may come next: bit ``t % 32`` of word ``t // 32``; tokens behind the last word may not.

        Raises:
            MatcherError: that cannot be computed within the limits.
        """

    def take(self, token_ids: Sequence[int]) -> int:
        """Goes on behind ``token_ids``, up to the first that may not come; returns how many were taken.

        Raises:
            MatcherError: the way on is over the limits; the matcher is of no use any more.
        """

    def give_back(self, count: int) -> None:
        """Takes back the last ``count`` tokens."""


class Grammars(Protocol):
    """Makes matchers of constraints. Not thread-safe."""

    def open(self, sampling: Sampling) -> Matcher:
        """A matcher at the start of an answer.

        Raises:
            RowInvalid: the constraint cannot be held by this worker.
        """
