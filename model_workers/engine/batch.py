"""The seam between the engine's decisions and its tensors: what one step computes, and who computes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one row.

    Attributes:
        tokens: at least one.
        start: position of the first of them in the row; all positions before it are in the cache.
        blocks: the row's block table: block ``i`` holds positions ``i * block_tokens`` to
            ``(i + 1) * block_tokens - 1``. Long enough for ``start + len(tokens)`` positions, may be longer.
        logits: for how many of the last tokens logits are wanted: 0 inside a prompt, 1 at its end and in decoding, more
            where drafted tokens are verified.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int


class PagedModel(Protocol):
    """A model with a paged KV cache. Not thread-safe.

    Attributes:
        block_tokens: tokens of a block.
        num_blocks: blocks of the cache; their numbers are 0 to ``num_blocks - 1``.
        context_tokens: longest row.
        vocab_size: width of the logits.
    """

    block_tokens: int
    num_blocks: int
    context_tokens: int
    vocab_size: int

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Computes all chunks packed, without padding, and writes their keys and values into the cache.

        Returns:
            float32 logits, shape (sum of ``chunk.logits``, vocab_size), in the order of the chunks, on the model's
            device. Valid until the next call.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to), in all layers: copy on write."""

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zeroes whole blocks in all layers: what a row whose numbers broke left behind (a masked NaN is still NaN)."""
