"""Attention of a prompt's chunk: its row's blocks are gathered once, the products are plain matrix products.

Queries go in pieces, each against the keys up to its own end: the scores of a piece stay in the processor's cache, and
half of a causal product is never computed.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from model_workers.engine.forward.pages import LayerShape, Pages
from model_workers.engine.forward.step import Span

PIECE_TOKENS: Final = 128
"""Most queries of a piece."""


class Gathered:
    """One chunk, in layers of one shape."""

    def __init__(self, span: Span, shape: LayerShape, pages: Pages) -> None:
        block_tokens = pages.block_tokens
        self.span = span
        self._shape = shape
        end = span.start + span.count
        first = 0
        if shape.window is not None:
            first = max(0, span.start - shape.window + 1) // block_tokens
        blocks = list(span.blocks[first : -(-end // block_tokens)])
        self._blocks = torch.tensor(blocks, device=pages.device)
        # Positions of the first key and of the first query, counted from the first gathered block.
        self._queries_from = span.start - first * block_tokens
        masks = (self._mask(piece, pages.dtype) for piece in self._pieces())
        self._hidden = [mask.to(pages.device) for mask in masks]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The answers [tokens, heads, value size] to the chunk's scaled queries [tokens, heads, key size]."""
        keys, values = self._keys_values(key, value, pages)
        kv_heads, softcap = self._shape.kv_heads, self._shape.softcap
        asked = query.view(len(query), kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)
        answers = query.new_empty(len(query), kv_heads, asked.shape[1], values.shape[-1])
        for piece, hidden in zip(self._pieces(), self._hidden, strict=True):
            part = asked[:, :, piece.start : piece.stop]
            seen = hidden.shape[-1]
            scores = torch.matmul(part.flatten(1, 2), keys[:, :, :seen])
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            scores = scores.view(*part.shape[:3], seen).add_(hidden)
            found = torch.matmul(torch.softmax(scores, -1).flatten(1, 2), values[:, :seen])
            answers[piece.start : piece.stop] = found.view(*part.shape[:3], -1).permute(2, 0, 1, 3)
        return answers.flatten(1, 2)

    def _keys_values(
        self, key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys [kv heads, size, tokens] and values [kv heads, tokens, size] from the first that is seen."""
        if self.span.start == 0:
            return key.permute(1, 2, 0).contiguous(), value.transpose(0, 1).contiguous()
        keys, values = (page.index_select(0, self._blocks) for page in pages)
        return keys.permute(1, 2, 0, 3).flatten(2), values.transpose(0, 1).flatten(1, 2)

    def _pieces(self) -> Iterator[range]:
        for start in range(0, self.span.count, PIECE_TOKENS):
            yield range(start, min(start + PIECE_TOKENS, self.span.count))

    def _mask(self, piece: range, dtype: torch.dtype) -> Tensor:
        """0 or minus infinity, [queries, keys up to the last query]."""
        asking = torch.arange(piece.start, piece.stop)[:, None] + self._queries_from
        place = torch.arange(piece.stop + self._queries_from)
        hidden = place > asking
        if self._shape.window is not None:
            hidden |= place <= asking - self._shape.window
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
