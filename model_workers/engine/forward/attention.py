"""Attention over the paged cache for one step at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_workers.engine.batch import Chunk
from model_workers.engine.forward.bags import Bags, Visible
from model_workers.engine.forward.gathered import Gathered
from model_workers.engine.forward.pages import LayerShape, Pages
from model_workers.engine.forward.step import Step, pack


class PagedAttention:
    """Owns the pages, and knows what the current step writes and sees."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._device = pages.keys[0].device
        self._dtype = pages.keys[0].dtype

    def begin(self, chunks: Sequence[Chunk]) -> Step:
        """Starts a step: packs its chunks."""
        self._step = step = pack(chunks, self.pages.block_tokens)
        self._blocks = self.tensor(step.blocks)
        self._offsets = self.tensor(step.offsets)
        self._visible: dict[int | None, Visible] = {}
        self._bags: dict[tuple[LayerShape, int | None], Bags] = {}
        self._gathered: dict[int | None, list[Gathered]] = {}
        return step

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Writes keys and values [tokens, kv heads, size], and answers queries [tokens, heads, size].

        Returns:
            [tokens, heads, value size].
        """
        pages, step = self.pages, self._step
        pages.write(layer, self._blocks, self._offsets, key, value)
        keys, values, shape = pages.keys[layer], pages.values[layer], pages.shapes[layer]
        query = query * scaling
        parts = []
        if step.short:
            bags = self._short(shape, window)
            parts.append(bags.attend(query[: step.short_tokens], keys, values, softcap))
        for gathered in self._long(window):
            span = gathered.span
            part = query[span.first : span.first + span.count]
            parts.append(gathered.attend(part, keys, values, shape, softcap))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tensor(self, values: object) -> Tensor:
        """Integers on the model's device."""
        return torch.as_tensor(values, device=self._device)

    def _short(self, shape: LayerShape, window: int | None) -> Bags:
        size = self.pages.block_tokens
        if window not in self._visible:
            self._visible[window] = Visible(self._step.short, window, size, self._dtype)
        if (shape, window) not in self._bags:
            self._bags[shape, window] = Bags(self._visible[window], shape, size)
        return self._bags[shape, window]

    def _long(self, window: int | None) -> list[Gathered]:
        if window not in self._gathered:
            self._gathered[window] = [
                Gathered(span, window, self.pages.block_tokens, self._device)
                for span in self._step.long
            ]
        return self._gathered[window]
