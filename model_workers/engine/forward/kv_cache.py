"""The memory of a paged KV cache.

One tensor per layer for keys and one for values, addressed by block. Keys are stored with their tokens innermost, so
that a score is a weighted sum over the head size just as an answer is a weighted sum over tokens: decode attention in
`attention.py` needs both. (`flash.py` has a cache in the layout of its kernel.)

What earlier rows left in a block is masked, not erased: it must be finite, because a masked NaN is still NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from model_workers.engine.devices import on_device


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for a token, and how far back it looks.

    Attributes:
        window: a token sees this many tokens, itself included; None: all before it.
        softcap: scores are squashed by tanh to between plus and minus this; None: they are not.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    softcap: float | None = None

    def values_per_token(self) -> int:
        """Numbers that a token takes."""
        return self.kv_heads * (self.key_size + self.value_size)


class KvCache:
    """Keys [blocks, kv heads, key size, block tokens] and values [blocks, kv heads, block tokens, value size].

    Attributes:
        rounds: what is read differs from what was written. Then rows must see keys and values as the cache has them
            also of the tokens of their own step, or answers would depend on how a prompt is cut into chunks.
    """

    rounds: ClassVar[bool] = False

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
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

    @staticmethod
    def bytes_per_block(shapes: Sequence[LayerShape], block_tokens: int, dtype: torch.dtype) -> int:
        """Memory of one block in all layers."""
        return sum(s.values_per_token() for s in shapes) * block_tokens * dtype.itemsize

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values."""
        return self.keys[layer], self.values[layer]

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Stores tokens, key and value [tokens, kv heads, size], at their blocks and offsets in those."""
        self.keys[layer].permute(0, 3, 1, 2).index_put_((blocks, offsets), key)
        self.values[layer].permute(0, 2, 1, 3).index_put_((blocks, offsets), value)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks."""
        places = on_device(np.array(blocks), self.device)
        for tensor in self._tensors():
            tensor.index_fill_(0, places, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, (from, to)."""
        source, target = on_device(np.array(pairs), self.device).unbind(1)
        for tensor in self._tensors():
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def _tensors(self) -> Sequence[Tensor]:
        return (*self.keys, *self.values)

    def _keys(self, shape: LayerShape) -> Tensor:
        return self._zeros(self.num_blocks, shape.kv_heads, shape.key_size, self.block_tokens)

    def _values(self, shape: LayerShape) -> Tensor:
        return self._zeros(self.num_blocks, shape.kv_heads, self.block_tokens, shape.value_size)

    def _zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(sizes, dtype=dtype or self.dtype, device=self.device)


FP8: Final = torch.float8_e4m3fn
FP8_EXPONENT: Final = 8
"""Numbers are scaled to below 2 to the power of this: the format holds up to 448."""
EXPONENT_MAX: Final = 120
"""The largest exponent of a scale: it is kept in 8 bits."""


class Fp8KvCache(KvCache):
    """Keys and values in 8-bit floats (e4m3), [blocks, block tokens, kv heads, size]: half of bfloat16's memory.

    The numbers of a token and head have an exponent of their own, so nothing is calibrated, and a token is rounded in
    the same way whatever is beside it. Attention computes with the blocks of a step (`read`) in ``dtype``.
    """

    rounds = True

    def __init__(self, shapes: Sequence[LayerShape], **sizes: Any) -> None:
        super().__init__(shapes, **sizes)
        self._exponents = [
            tuple(self._of_tokens(torch.int8, shape.kv_heads) for _ in "kv") for shape in shapes
        ]

    @staticmethod
    @override
    def bytes_per_block(shapes: Sequence[LayerShape], block_tokens: int, dtype: torch.dtype) -> int:
        return sum(s.values_per_token() + 2 * s.kv_heads for s in shapes) * block_tokens

    @override
    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        self.write_slots(layer, blocks * self.block_tokens + offsets, key, value)

    def write_slots(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes keys and values, scaled, as `FlashKvCache.write_slots` does."""
        pairs = zip(self.of(layer), self._exponents[layer], (key, value), strict=True)
        for table, exponents, new in pairs:
            exponent = torch.frexp(new.abs().amax(-1).float()).exponent - FP8_EXPONENT
            exponent.clamp_(-EXPONENT_MAX, EXPONENT_MAX)
            rounded = torch.ldexp(new.float(), -exponent[..., None]).to(FP8)
            table.flatten(0, 1).index_copy_(0, slots, rounded.view(torch.uint8))
            exponents.flatten(0, 1).index_copy_(0, slots, exponent.to(torch.int8))

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [number of blocks, block tokens, kv heads, size] of some blocks, as attention takes them."""
        keys, values = (
            torch.ldexp(
                table.index_select(0, blocks).view(FP8).float(),
                exponents.index_select(0, blocks)[..., None],
            ).to(self.dtype)
            for table, exponents in zip(self.of(layer), self._exponents[layer], strict=True)
        )
        return keys, values

    def _tensors(self) -> Sequence[Tensor]:
        return (*super()._tensors(), *chain.from_iterable(self._exponents))

    def _keys(self, shape: LayerShape) -> Tensor:
        return self._of_tokens(torch.uint8, shape.kv_heads, shape.key_size)

    def _values(self, shape: LayerShape) -> Tensor:
        return self._of_tokens(torch.uint8, shape.kv_heads, shape.value_size)

    def _of_tokens(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        # As bytes: few operations are there for 8-bit floats.
        return self._zeros(self.num_blocks, self.block_tokens, *sizes, dtype=dtype)
