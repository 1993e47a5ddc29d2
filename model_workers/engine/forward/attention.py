"""Attention over the paged cache for one step at a time; this one runs on any device, and was made for CPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_workers.engine.batch import Chunk
from model_workers.engine.forward.bags import Bags, Visible
from model_workers.engine.forward.gathered import Gathered
from model_workers.engine.forward.pages import LayerShape, Pages
from model_workers.engine.forward.step import pack


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a model needs of a step, on its device.

    Attributes:
        tokens, positions: of every packed token.
        wanted: packed places whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    wanted: Tensor


class Attention(Protocol):
    """Owns the pages, and knows what the current step writes and sees."""

    @property
    def pages(self) -> Pages:
        """The cache."""

    def begin(self, chunks: Sequence[Chunk]) -> Inputs:
        """Starts a step."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
    ) -> Tensor:
        """Writes keys and values [tokens, kv heads, size], and answers queries [tokens, heads, size].

        Returns:
            [tokens, heads, value size].
        """


class PagedAttention:
    """See `Attention`: short chunks as `Bags`, prompts as `Gathered`."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages

    def begin(self, chunks: Sequence[Chunk]) -> Inputs:
        """See `Attention.begin`."""
        self._step = step = pack(chunks, self.pages.block_tokens)
        self._blocks, self._offsets = self._tensor(step.blocks), self._tensor(step.offsets)
        self._visible: dict[int | None, Visible] = {}
        self._short: dict[LayerShape, Bags] = {}
        self._long: dict[LayerShape, list[Gathered]] = {}
        return Inputs(*(self._tensor(part) for part in (step.tokens, step.positions, step.wanted)))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
    ) -> Tensor:
        """See `Attention.attend`."""
        self.pages.write(layer, self._blocks, self._offsets, key, value)
        pages, shape = self.pages.of(layer), self.pages.shapes[layer]
        query = query * scaling
        parts = []
        if self._step.short:
            part = query[: self._step.short_tokens]
            parts.append(self._bags(shape).attend(part, pages))
        for chunk in self._gathered(shape):
            place = slice(chunk.span.first, chunk.span.first + chunk.span.count)
            parts.append(chunk.attend(query[place], key[place], value[place], pages))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, device=self.pages.device)

    def _bags(self, shape: LayerShape) -> Bags:
        if shape.window not in self._visible:
            self._visible[shape.window] = Visible(self._step.short, shape.window, self.pages)
        if shape not in self._short:
            self._short[shape] = Bags(self._visible[shape.window], shape, self.pages)
        return self._short[shape]

    def _gathered(self, shape: LayerShape) -> list[Gathered]:
        if shape not in self._long:
            self._long[shape] = [Gathered(s, shape, self.pages) for s in self._step.long]
        return self._long[shape]
