"""The memory of a paged KV cache.

There is one tensor per layer for keys and one for values, addressed by block. Keys are stored with their tokens
innermost, so that a score is a weighted sum over the head size as an answer is a weighted sum over tokens: decode
attention in `attention.py` needs both. (`flash.py` has a cache in the layout of its kernel.)

What earlier sequences left in a block is masked, not erased. It must be finite, because a masked NaN is still NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_workers.engine.devices import on_device


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for a token, and how far back it looks.

    Attributes:
        window: Number of tokens that a token sees, itself included; None: all before it.
        softcap: Scores are limited by tanh to plus and minus this; None: they are not.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    softcap: float | None = None


class KvCache:
    """Keys [blocks, kv heads, key size, block tokens] and values [blocks, kv heads, block tokens, value size]."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.device = device
        self.keys = [self._keys(shape) for shape in shapes]
        self.values = [self._values(shape) for shape in shapes]

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values."""
        return self.keys[layer], self.values[layer]

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Store keys and values [tokens, kv heads, size] at their blocks and offsets."""
        self.keys[layer].permute(0, 3, 1, 2).index_put_((blocks, offsets), key)
        self.values[layer].permute(0, 2, 1, 3).index_put_((blocks, offsets), value)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks."""
        places = on_device(np.array(blocks), self.device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, places, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, as (from, to)."""
        source, target = on_device(np.array(pairs), self.device).unbind(1)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def _keys(self, shape: LayerShape) -> Tensor:
        return self._zeros(self.num_blocks, shape.kv_heads, shape.key_size, self.block_tokens)

    def _values(self, shape: LayerShape) -> Tensor:
        return self._zeros(self.num_blocks, shape.kv_heads, self.block_tokens, shape.value_size)

    def _zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)
