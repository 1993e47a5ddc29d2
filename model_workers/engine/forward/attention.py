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
        self._short: dict[LayerShape, Bags] = {}
        self._long: dict[LayerShape, list[Gathered]] = {}
        return step

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Writes keys and values [tokens, kv heads, size], and answers queries [tokens, heads, size].

        Returns:
            [tokens, heads, value size].
        """
        self.pages.write(layer, self._blocks, self._offsets, key, value)
        pages, shape = self.pages.of(layer), self.pages.shapes[layer]
        query = query * scaling
        parts = []
        if self._step.short:
            part = query[: self._step.short_tokens]
            parts.append(self._bags(shape).attend(part, pages, softcap))
        for chunk in self._gathered(shape):
            place = slice(chunk.span.first, chunk.span.first + chunk.span.count)
            parts.append(chunk.attend(query[place], key[place], value[place], pages, softcap))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tensor(self, values: object) -> Tensor:
        """Integers on the model's device."""
        return torch.as_tensor(values, device=self._device)

    def _bags(self, shape: LayerShape) -> Bags:
        size = self.pages.block_tokens
        if shape.window not in self._visible:
            visible = Visible(self._step.short, shape.window, size, self._dtype)
            self._visible[shape.window] = visible
        if shape not in self._short:
            self._short[shape] = Bags(self._visible[shape.window], shape, size)
        return self._short[shape]

    def _gathered(self, shape: LayerShape) -> list[Gathered]:
        if shape not in self._long:
            size, dtype = self.pages.block_tokens, self._dtype
            self._long[shape] = [Gathered(s, shape, size, dtype) for s in self._step.long]
        return self._long[shape]
