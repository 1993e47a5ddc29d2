"""Attention over the paged cache, one step at a time, on any device; optimized for CPUs.

Chunks of few tokens (decoding) and chunks of prompts (prefill) are computed differently:

- Decode: single tokens, without copying the cache. Both halves of attention are weighted sums of table rows, which
  `torch.embedding_bag` computes with the rows found by index and summed in registers. A score for all tokens of a block
  is the sum over the head size of (query number) x (row of that block's keys, tokens innermost); the answer is the sum
  over tokens of (probability) x (that token's value). Each sum has a fixed order, so that a row's numbers do not depend
  on the other rows of the batch. Alternatives: docs/internals/decisions/paged-attention-cpu.md.
- Prefill: the blocks are gathered once, and the products are plain matrix products. Queries are split into pieces, each
  against the keys up to its own end: the scores of a piece stay in the processor's cache, and half of a causal product
  is never computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from model_workers.engine.devices import on_device
from model_workers.engine.forward.kv_cache import KvCache, LayerShape
from model_workers.engine.forward.packing import Ints, PackedChunk, pack
from model_workers.engine.paged_model import PagedModel, SequenceChunk

PIECE_TOKENS: Final = 128
"""Maximum number of queries of a piece in prefill."""
DRAWN_MAX: Final = 1024
"""Maximum number of tokens of a draw: as many as sequences can run at once."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs of a model's step, on its device.

    Attributes:
        tokens, positions: One per packed token.
        logits_indices: Packed indices whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    logits_indices: Tensor


class Attention(Protocol):
    """Owns the KV cache, and knows what the current step writes and sees."""

    @property
    def cache(self) -> KvCache:
        """Keys and values of all layers."""

    def begin(self, chunks: Sequence[SequenceChunk]) -> ModelInputs:
        """Begin a step."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        """Write keys and values [tokens, kv heads, size], and answer queries [tokens, heads, size].

        Returns:
            [tokens, heads, value size].
        """


class VisibleBlocks:
    """The blocks that each token sees, and the mask inside them, for one length of the sliding window.

    Attributes:
        blocks_max: Maximum number of blocks of a token.
        counts: Number of blocks of each token.
        blocks: Block numbers, token by token.
        hidden: 0 or minus infinity, [tokens, 1, blocks_max * block_tokens].
    """

    def __init__(self, chunks: Sequence[PackedChunk], window: int | None, cache: KvCache) -> None:
        block_tokens = cache.block_tokens
        rows: list[int] = []
        firsts: list[int] = []
        starts: list[int] = []
        positions: list[int] = []
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                first = 0 if window is None else max(0, position - window + 1)
                block = first // block_tokens
                visible = chunk.blocks[block : position // block_tokens + 1]
                rows.extend(visible)
                starts.append(len(visible))
                firsts.append(first - block * block_tokens)
                positions.append(position - block * block_tokens)
        self.counts = np.array(starts)
        self.blocks = np.array(rows)
        self.blocks_max = int(self.counts.max())
        place = np.arange(self.blocks_max * block_tokens)
        hides = (place > np.array(positions)[:, None]) | (place < np.array(firsts)[:, None])
        mask = torch.zeros(hides.shape, dtype=cache.dtype)
        mask.masked_fill_(torch.from_numpy(hides), -torch.inf)
        self.hidden = mask[:, None].to(cache.device)


class PagedDecodeAttention:
    """The index arrays of tokens that see certain blocks, for layers of one shape.

    They stay valid until a sequence gets another block: with few sequences for most steps.
    """

    def __init__(self, visible: VisibleBlocks, shape: LayerShape, cache: KvCache) -> None:
        block_tokens, device = cache.block_tokens, cache.device
        self._shape = shape
        self._counts, self._blocks = visible.counts, visible.blocks
        self._block_tokens = block_tokens
        heads, group = shape.heads, shape.heads // shape.kv_heads
        # One pair for every block that a head of a token sees: [tokens, heads, blocks seen], ragged.
        counts = np.repeat(visible.counts, heads)
        asking = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(asking)) - np.repeat(_before(counts), counts)
        row = np.repeat(np.repeat(_before(visible.counts), heads), counts) + within
        place = visible.blocks[row] * shape.kv_heads + asking % heads // group
        self._asking = torch.from_numpy(asking).to(device)
        self._pairs = torch.from_numpy(asking * visible.blocks_max + within).to(device)
        self._key_rows = _rows(place, shape.key_size).to(device)
        self._value_rows = _rows(place, block_tokens).to(device)
        width = np.minimum(np.arange(visible.blocks_max), counts[:, None])
        offsets = (_before(counts)[:, None] + width).ravel() * shape.key_size
        self._key_offsets = _with_end(offsets, len(place) * shape.key_size).to(device)
        tokens = _before(counts) * block_tokens
        self._value_offsets = _with_end(tokens, len(place) * block_tokens).to(device)

    def serves(self, visible: VisibleBlocks) -> bool:
        """Return whether these tokens see the same blocks."""
        return np.array_equal(visible.counts, self._counts) and np.array_equal(
            visible.blocks, self._blocks
        )

    def attend(self, query: Tensor, layer_cache: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
        """Return the answers [tokens, heads, value size] to scaled queries [tokens, heads, key size].

        Args:
            query: Scaled queries.
            layer_cache: Keys and values of the layer.
            hidden: See `VisibleBlocks`.
        """
        keys, values = layer_cache
        shape, tokens = self._shape, len(query)
        weights = query.reshape(-1, shape.key_size).index_select(0, self._asking).view(-1)
        scores = _weighted_sums(
            keys.view(-1, self._block_tokens), self._key_rows, self._key_offsets, weights
        ).view(tokens, shape.heads, -1)
        if shape.softcap is not None:
            scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
        shares = torch.softmax(scores.add_(hidden), -1)
        shares = shares.view(-1, self._block_tokens).index_select(0, self._pairs).view(-1)
        answers = _weighted_sums(
            values.view(-1, shape.value_size), self._value_rows, self._value_offsets, shares
        )
        return answers.view(tokens, shape.heads, shape.value_size)


def _before(counts: Ints) -> Ints:
    """Return exclusive running sums."""
    return np.cumsum(counts) - counts


def _rows(place: Ints, size: int) -> Tensor:
    """Return the indices of the `size` table rows of each place."""
    rows = place.astype(np.int32)[:, None] * np.int32(size) + np.arange(size, dtype=np.int32)
    return torch.from_numpy(rows.ravel())


def _with_end(offsets: Ints, end: int) -> Tensor:
    return torch.from_numpy(np.append(offsets, end).astype(np.int32))


def _weighted_sums(table: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    return torch.embedding_bag(
        table, rows, offsets, False, 0, False, weights, include_last_offset=True
    )[0]


class PrefillAttention:
    """Attention of one chunk, in layers of one shape."""

    def __init__(self, chunk: PackedChunk, shape: LayerShape, cache: KvCache) -> None:
        block_tokens = cache.block_tokens
        self.chunk = chunk
        self._shape = shape
        end = chunk.start + chunk.count
        first = 0
        if shape.window is not None:
            first = max(0, chunk.start - shape.window + 1) // block_tokens
        blocks = list(chunk.blocks[first : -(-end // block_tokens)])
        self._blocks = torch.tensor(blocks, device=cache.device)
        # Positions of the first key and of the first query, counted from the first gathered block.
        self._queries_from = chunk.start - first * block_tokens
        masks = (self._mask(piece, cache.dtype) for piece in self._pieces())
        self._hidden = [mask.to(cache.device) for mask in masks]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer_cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the answers [tokens, heads, value size] to the chunk's scaled queries [tokens, heads, key size]."""
        keys, values = self._keys_values(key, value, layer_cache)
        kv_heads, softcap = self._shape.kv_heads, self._shape.softcap
        queries = query.view(len(query), kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)
        answers = query.new_empty(len(query), kv_heads, queries.shape[1], values.shape[-1])
        for piece, hidden in zip(self._pieces(), self._hidden, strict=True):
            part = queries[:, :, piece.start : piece.stop]
            length = hidden.shape[-1]
            scores = torch.matmul(part.flatten(1, 2), keys[:, :, :length])
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            scores = scores.view(*part.shape[:3], length).add_(hidden)
            output = torch.matmul(torch.softmax(scores, -1).flatten(1, 2), values[:, :length])
            answers[piece.start : piece.stop] = output.view(*part.shape[:3], -1).permute(2, 0, 1, 3)
        return answers.flatten(1, 2)

    def _keys_values(
        self, key: Tensor, value: Tensor, layer_cache: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return keys [kv heads, size, tokens] and values [kv heads, tokens, size] from the first visible one."""
        if not self.chunk.start:
            return key.permute(1, 2, 0).contiguous(), value.transpose(0, 1).contiguous()
        keys, values = (table.index_select(0, self._blocks) for table in layer_cache)
        return keys.permute(1, 2, 0, 3).flatten(2), values.transpose(0, 1).flatten(1, 2)

    def _pieces(self) -> Iterator[range]:
        for start in range(0, self.chunk.count, PIECE_TOKENS):
            yield range(start, min(start + PIECE_TOKENS, self.chunk.count))

    def _mask(self, piece: range, dtype: torch.dtype) -> Tensor:
        """Return 0 or minus infinity, [queries, keys up to the last query]."""
        asking = torch.arange(piece.start, piece.stop)[:, None] + self._queries_from
        place = torch.arange(piece.stop + self._queries_from)
        hidden = place > asking
        if self._shape.window is not None:
            hidden |= place <= asking - self._shape.window
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


class PagedAttention:
    """Attention with `PagedDecodeAttention` for short chunks and `PrefillAttention` for longer ones."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self._shapes = tuple(dict.fromkeys(cache.shapes))
        self._shape_of_layer = [self._shapes.index(shape) for shape in cache.shapes]
        self._decode: list[PagedDecodeAttention] = []

    def begin(self, chunks: Sequence[SequenceChunk]) -> ModelInputs:
        """Begin a step; see `Attention.begin`."""
        step = pack(chunks, self.cache.block_tokens)
        if step.short:
            self._begin_decode(step.short)
        self._short_tokens = step.short_tokens
        self._prefill = [
            [PrefillAttention(chunk, shape, self.cache) for chunk in step.long]
            for shape in self._shapes
        ]
        arrays = (step.tokens, step.positions, step.logits_indices, step.blocks, step.offsets)
        tokens, positions, logits_indices, self._blocks, self._offsets = (
            on_device(array, self.cache.device) for array in arrays
        )
        return ModelInputs(tokens, positions, logits_indices)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        """Compute attention of one layer; see `Attention.attend`."""
        self.cache.write(layer, self._blocks, self._offsets, key, value)
        layer_cache, shape = self.cache.of(layer), self._shape_of_layer[layer]
        query = query * scaling
        parts = []
        if self._short_tokens:
            decoding, hidden = query[: self._short_tokens], self._visible[shape].hidden
            parts.append(self._decode[shape].attend(decoding, layer_cache, hidden))
        for prompt in self._prefill[shape]:
            part = slice(prompt.chunk.first, prompt.chunk.first + prompt.chunk.count)
            parts.append(prompt.attend(query[part], key[part], value[part], layer_cache))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _begin_decode(self, chunks: Sequence[PackedChunk]) -> None:
        windows = {shape.window for shape in self._shapes}
        visible = {window: VisibleBlocks(chunks, window, self.cache) for window in windows}
        self._visible = [visible[shape.window] for shape in self._shapes]
        pairs = zip(self._decode, self._visible, strict=False)
        if not self._decode or not all(decode.serves(chunk_pair) for decode, chunk_pair in pairs):
            self._decode = [
                PagedDecodeAttention(visible[shape.window], shape, self.cache)
                for shape in self._shapes
            ]


class CachedModel(PagedModel):
    """Base of models over the paged cache; see `PagedModel`."""

    def __init__(self, attention: Attention, context_tokens: int, vocab_size: int) -> None:
        self.block_tokens = attention.cache.block_tokens
        self.num_blocks = attention.cache.num_blocks
        self.context_tokens = context_tokens
        self.vocab_size = vocab_size
        self._attention = attention
        device = attention.cache.device
        self._drawn = torch.zeros(DRAWN_MAX, dtype=torch.long, device=device)
        # On CUDA from the start, because graphs read them.
        self._reads_drawn = device.type == "cuda"

    @override
    def feed(self, drawn: Tensor) -> None:
        self._reads_drawn = True
        # A row without a distribution has no token; what is computed for it is dropped.
        self._drawn[: len(drawn)] = drawn.clamp_min(0)

    @override
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._attention.cache.copy(pairs)

    @override
    def clear_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._attention.cache.clear(blocks)

    def _resolve_tokens(self, tokens: Tensor) -> Tensor:
        """Return tokens with the placeholders replaced by those that `feed` has kept."""
        if not self._reads_drawn:
            return tokens
        fed = self._drawn.index_select(0, (-1 - tokens).clamp_min_(0))
        return torch.where(tokens < 0, fed, tokens)
