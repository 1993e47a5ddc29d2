"""Attention of single tokens over a paged cache, on a CPU, without copying the cache.

Both halves of attention are weighted sums of table rows, which is what `torch.embedding_bag` computes, with the rows
found by index and summed in registers:

- a score for all tokens of a block is the sum over the head size of (query number) x (row of that block's keys, tokens
  innermost);
- the answer is the sum over tokens of (probability) x (that token's value).

A bag is summed by itself in a fixed order, so a row's numbers do not depend on the other rows of the batch.
docs/decisions/paged-attention-cpu.md says what else was measured.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_workers.engine.forward.pages import LayerShape, Pages
from model_workers.engine.forward.step import Ints, Span


class Visible:
    """Which blocks each token sees, and the mask inside of them; for one length of the sliding window.

    Attributes:
        tokens: how many tokens ask.
        blocks_max: the widest row of blocks.
        counts: blocks each token sees.
        blocks: their numbers, token by token.
        hidden: 0 or minus infinity, [tokens, 1, blocks_max * block_tokens].
    """

    def __init__(self, spans: Sequence[Span], window: int | None, pages: Pages) -> None:
        block_tokens = pages.block_tokens
        rows: list[int] = []
        firsts: list[int] = []
        starts: list[int] = []
        positions: list[int] = []
        for span in spans:
            for position in range(span.start, span.start + span.count):
                first = 0 if window is None else max(0, position - window + 1)
                block = first // block_tokens
                seen = span.blocks[block : position // block_tokens + 1]
                rows.extend(seen)
                starts.append(len(seen))
                firsts.append(first - block * block_tokens)
                positions.append(position - block * block_tokens)
        self.tokens = len(positions)
        self.counts = np.array(starts)
        self.blocks = np.array(rows)
        self.blocks_max = int(self.counts.max())
        place = np.arange(self.blocks_max * block_tokens)
        hides = (place > np.array(positions)[:, None]) | (place < np.array(firsts)[:, None])
        mask = torch.zeros(hides.shape, dtype=pages.dtype)
        mask.masked_fill_(torch.from_numpy(hides), -torch.inf)
        self.hidden = mask[:, None].to(pages.device)


class Bags:
    """The index arrays of one step, for layers of one shape."""

    def __init__(self, visible: Visible, shape: LayerShape, pages: Pages) -> None:
        block_tokens, device = pages.block_tokens, pages.device
        self._shape = shape
        self._visible = visible
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
        self._key_bags = _with_end(offsets, len(place) * shape.key_size).to(device)
        tokens = _before(counts) * block_tokens
        self._value_bags = _with_end(tokens, len(place) * block_tokens).to(device)

    def attend(self, query: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        """The answers [tokens, heads, value size] to scaled queries [tokens, heads, key size]."""
        keys, values = pages
        shape, visible = self._shape, self._visible
        weights = query.reshape(-1, shape.key_size).index_select(0, self._asking).view(-1)
        scores = _bag_sums(
            keys.view(-1, self._block_tokens), self._key_rows, self._key_bags, weights
        ).view(visible.tokens, shape.heads, -1)
        if shape.softcap is not None:
            scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
        shares = torch.softmax(scores.add_(visible.hidden), -1)
        shares = shares.view(-1, self._block_tokens).index_select(0, self._pairs).view(-1)
        answers = _bag_sums(
            values.view(-1, shape.value_size), self._value_rows, self._value_bags, shares
        )
        return answers.view(visible.tokens, shape.heads, shape.value_size)


def _before(counts: Ints) -> Ints:
    """Running sums, each without its own."""
    return np.cumsum(counts) - counts


def _rows(place: Ints, size: int) -> Tensor:
    """Numbers of the ``size`` table rows behind each place."""
    rows = place.astype(np.int32)[:, None] * np.int32(size) + np.arange(size, dtype=np.int32)
    return torch.from_numpy(rows.ravel())


def _with_end(offsets: Ints, end: int) -> Tensor:
    return torch.from_numpy(np.append(offsets, end).astype(np.int32))


def _bag_sums(table: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    return torch.embedding_bag(
        table, rows, bags, False, 0, False, weights, include_last_offset=True
    )[0]
