"""Which tokens a row has and how often, for the penalties.

Kept as two short arrays instead of a column per token of the vocabulary: a step touches as many logits as the row has
different tokens, and a row costs nothing on the device.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Occurrences:
    """The different tokens of prompt and answer, and how often the answer has each."""

    def __init__(self, prompt: Sequence[int], produced: Sequence[int]) -> None:
        first = dict.fromkeys(prompt)
        self._places = {token_id: place for place, token_id in enumerate(first)}
        self._tokens = np.fromiter(first, np.int64, len(first))
        self._counts = np.zeros(len(first), np.int64)
        self.add(produced)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Each token once, in the order in which they came."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often the answer has each of `tokens`; 0 for those of the prompt alone."""
        return self._counts[: len(self._places)]

    def add(self, token_ids: Sequence[int]) -> None:
        """Appends tokens of the answer."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._tokens):
                self._grow()
            self._tokens[place] = token_id
            self._counts[place] += 1

    def behind(self, token_ids: Sequence[int]) -> "Occurrences":
        """What there would be behind ``token_ids``; itself when there are none."""
        if not token_ids:
            return self
        copy = Occurrences((), ())
        copy._places = dict(self._places)
        copy._tokens, copy._counts = self._tokens.copy(), self._counts.copy()
        copy.add(token_ids)
        return copy

    def _grow(self) -> None:
        more = max(16, len(self._tokens))
        self._tokens = np.concatenate([self._tokens, np.zeros(more, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
