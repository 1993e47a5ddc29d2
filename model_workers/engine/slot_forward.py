"""The forward passes of an engine: token lists in, logits out. Owns the model and its slot cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model_workers.engine.slot_cache import SlotCache


class Forward:
    """Runs a causal language model of transformers over rows in slots."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self.cache = cache
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._model = model
        self._device = model.device

    def decode(self, tokens: Sequence[int], cached: Sequence[int]) -> Tensor:
        """Logits [rows, vocabulary] behind one new token in each of the first slots.

        ``cached`` says how many tokens each slot holds already.
        """
        positions = self.tensor(cached)
        length = max(cached) + 1
        self.cache.aim(0, len(tokens), positions, length)
        visible = torch.arange(length, device=self._device) <= positions[:, None]
        logits = self._run(
            self.tensor(tokens)[:, None], positions[:, None], visible[:, None, None, :]
        )
        return logits[:, -1]

    def prefill(self, first: int, contexts: Sequence[list[int]], start: int, end: int) -> Tensor:
        """Logits [rows, vocabulary] behind the last token of each row, in the slots from ``first``.

        The pass goes over the positions from ``start`` to ``end``; a row that is longer goes on from ``end`` next time.
        Short rows are padded on the right with their own last token: no token of theirs sees the padding.
        """
        padded = [c[start:end] + c[-1:] * (end - len(c)) for c in contexts]
        last = self.tensor([min(len(c), end) - 1 - start for c in contexts])
        kept, where = torch.unique(last, return_inverse=True)
        positions = torch.arange(start, end, device=self._device)
        visible = torch.arange(end, device=self._device) <= positions[:, None]
        self.cache.aim(first, len(contexts), start, end)
        logits = self._run(
            self.tensor(padded),
            positions[None].expand(len(contexts), -1),
            visible[None, None],
            kept,
        )
        return logits[torch.arange(len(contexts), device=self._device), where]

    def seen(self, tokens: Sequence[int]) -> Tensor:
        """Which tokens of the vocabulary occur in ``tokens``, as booleans."""
        marks = torch.zeros(self.vocabulary, dtype=torch.bool, device=self._device)
        marks[self.tensor(tokens)] = True
        return marks

    def tensor(self, values: Any) -> Tensor:
        """Integers on the model's device."""
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _run(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, kept: Tensor | int = 0
    ) -> Tensor:
        dtype = self._model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=self._device)
        output = self._model(
            input_ids=tokens,
            # Four dimensions: transformers takes such a mask as it is.
            attention_mask=mask.masked_fill_(~visible, torch.finfo(dtype).min),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=kept,
        )
        logits: Tensor = output.logits
        return logits
