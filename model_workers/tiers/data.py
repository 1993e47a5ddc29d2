"""Training batches: conversations as token ids, padded in groups of like length."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast

from model_workers.tiers.example import Cell, Example
from model_workers.tiers.tasks import stream
from model_workers.tiers.tokenizer import SYSTEM_TURNS

IGNORED: Final = -100  # the label of a token no loss is taken on
_SYSTEM_SHARE: Final = 0.1
_SECOND_TURN_SHARE: Final = 0.06

Conversation = tuple[list[int], list[int]]  # token ids and the label of each
Step = list[tuple[torch.Tensor, torch.Tensor]]  # micro-batches of the same


class Feed:
    """An endless, seeded supply of steps; each is a list of (ids, labels) micro-batches."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, mix: Mapping[Cell, float], size: int, seed: int
    ) -> None:
        self._encode = tokenizer.backend_tokenizer.encode
        self._examples = stream(seed, mix)
        self._rng = Random(f"feed {seed}")
        self._size = size

    def steps(self, tokens_max: int) -> Iterator[Step]:
        """Steps of `size` conversations, in micro-batches of at most `tokens_max` padded tokens."""
        while True:
            conversations = [self._conversation() for _ in range(self._size)]
            conversations.sort(key=lambda c: len(c[0]))
            yield [_pad(group) for group in _groups(conversations, tokens_max)]

    def _conversation(self) -> Conversation:
        text = "<|bos|>"
        if self._rng.random() < _SYSTEM_SHARE:
            text += f"<|system|>{self._rng.choice(SYSTEM_TURNS)}<|end|>"
        ids = self._ids(text)
        labels = [IGNORED] * len(ids)
        self._add_turn(ids, labels, next(self._examples))
        while self._rng.random() < _SECOND_TURN_SHARE:
            self._add_turn(ids, labels, next(self._examples))
        return ids, labels

    def _add_turn(self, ids: list[int], labels: list[int], example: Example) -> None:
        asked = self._ids(f"<|user|>{example.prompt}<|end|><|assistant|>")
        said = self._ids(f"{example.answer}<|end|>")
        ids += asked + said
        labels += [IGNORED] * len(asked) + said

    def _ids(self, text: str) -> list[int]:
        return list(self._encode(text).ids)


def _groups(conversations: list[Conversation], tokens_max: int) -> Iterator[list[Conversation]]:
    group: list[Conversation] = []
    for conversation in conversations:  # by length: the newest is the longest of its group
        if group and (len(group) + 1) * len(conversation[0]) > tokens_max:
            yield group
            group = []
        group.append(conversation)
    yield group


def _pad(group: list[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
    # Padding stands on the right, where causal attention never looks: no mask is needed.
    width = len(group[-1][0])
    ids = torch.tensor([c[0] + [0] * (width - len(c[0])) for c in group])
    labels = torch.tensor([c[1] + [IGNORED] * (width - len(c[1])) for c in group])
    return ids, labels
