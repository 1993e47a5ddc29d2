"""One place of a row for which a token is drawn."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model_workers.engine.protocol import Sampling
from model_workers.engine.sampling.occurrences import Occurrences

TEMPERATURE_MIN: Final = 1e-5
"""Below it float32 leaves the most probable token alone; such a row is greedy."""


@dataclass(frozen=True, slots=True)
class Position:
    """What a draw depends on beside the logits.

    Attributes:
        index: of the token in the answer.
        plain: the most probable token is all that is asked for.
        occurrences: set when there are penalties.
        allowed: set when there is a constraint: see `Matcher.mask`.
        error: one sentence when nothing can be drawn here.
    """

    sampling: Sampling
    index: int
    plain: bool
    occurrences: Occurrences | None = None
    allowed: NDArray[np.int32] | None = None
    error: str = ""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, whatever happens to the logits before."""
        return is_greedy(self.sampling)

    @property
    def closed(self) -> frozenset[int]:
        """Tokens that must not come because the answer is too short to end."""
        too_short = self.index < self.sampling.min_tokens
        return self.sampling.stop_token_ids if too_short else frozenset()


def is_greedy(sampling: Sampling) -> bool:
    """Whether no random number is needed."""
    return sampling.temperature < TEMPERATURE_MIN
