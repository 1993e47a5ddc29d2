"""Sequences and matchers for the tests of sampling."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model_workers.engine.protocol import Sampling, SequenceSpec
from model_workers.engine.sampling.sampler import DrawRequest, DrawResult, Sampler
from model_workers.engine.sampling.state import SamplingState

SIZE = 12


def logits(*sequences: Sequence[float]) -> torch.Tensor:
    return torch.tensor(sequences, dtype=torch.float32)


def opened(
    prompt: Sequence[int] = (0,), produced: Sequence[int] = (), **sampling: Any
) -> SamplingState:
    return Sampler().open(spec(prompt, produced, **sampling))


def spec(
    prompt: Sequence[int] = (0,), produced: Sequence[int] = (), **sampling: Any
) -> SequenceSpec:
    chosen = Sampling(**({"max_tokens": 1 << 20} | sampling))
    return SequenceSpec("sequence", "owner", 0, tuple(prompt), tuple(produced), chosen)


def draw(scores: torch.Tensor, *sequences: SamplingState) -> list[DrawResult]:
    return Sampler().draw(scores, [DrawRequest(sequence) for sequence in sequences])


def tokens(scores: torch.Tensor, *sequences: SamplingState) -> list[int]:
    """The single token of each sequence."""
    return [token for drawn in draw(scores, *sequences) for token in drawn.token_ids]


class ListMatcher:
    """The answer must be one of some lists of tokens, each ended by ``stop``."""

    def __init__(self, lists: Sequence[Sequence[int]], stop: int) -> None:
        self._lists = [[*tokens, stop] for tokens in lists]
        self._taken: list[int] = []

    def mask(self) -> NDArray[np.int32]:
        word = sum(1 << token for token in self._next())
        return np.array([word], np.int32)

    def take(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if token not in self._next():
                return count
            self._taken.append(token)
        return len(token_ids)

    def give_back(self, count: int) -> None:
        del self._taken[len(self._taken) - count :]

    def _next(self) -> set[int]:
        at = len(self._taken)
        return {
            tokens[at] for tokens in self._lists if tokens[:at] == self._taken and at < len(tokens)
        }


class ListGrammars:
    """Makes `ListMatcher` of a constraint written ``1,2|1,3``; token 0 ends an answer."""

    def open(self, sampling: Sampling) -> ListMatcher:
        assert sampling.regex is not None
        lists = [[int(t) for t in part.split(",") if t] for part in sampling.regex.split("|")]
        return ListMatcher(lists, 0)
