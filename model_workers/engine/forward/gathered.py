"""Attention of a prompt's chunk: its row's blocks are gathered once, the products are plain matrix products."""

import torch
from torch import Tensor

from model_workers.engine.forward.pages import LayerShape
from model_workers.engine.forward.step import Span


class Gathered:
    """One chunk in layers of one shape and one window."""

    def __init__(
        self, span: Span, window: int | None, block_tokens: int, device: torch.device
    ) -> None:
        end = span.start + span.count
        first = 0 if window is None else max(0, span.start - window + 1) // block_tokens
        last = (end - 1) // block_tokens
        self.span = span
        self._blocks = torch.tensor(span.blocks[first : last + 1], device=device)
        asking = torch.arange(span.start, end, device=device)[:, None]
        place = torch.arange(first * block_tokens, (last + 1) * block_tokens, device=device)
        self._hidden = place > asking
        if window is not None:
            self._hidden |= place <= asking - window

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, shape: LayerShape, softcap: float | None
    ) -> Tensor:
        """The answers [tokens, heads, value size] to scaled queries [tokens, heads, key size]."""
        tokens, group = self.span.count, shape.heads // shape.kv_heads
        key = keys.index_select(0, self._blocks).permute(1, 2, 0, 3).flatten(2)
        value = values.index_select(0, self._blocks).transpose(0, 1).flatten(1, 2)
        asked = query.view(tokens, shape.kv_heads, group, -1).permute(1, 2, 0, 3)
        scores = torch.matmul(asked.flatten(1, 2), key).view(shape.kv_heads, group, tokens, -1)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        shares = torch.softmax(scores.masked_fill_(self._hidden, -torch.inf), -1)
        answers = torch.matmul(shares.flatten(1, 2), value).view(shape.kv_heads, group, tokens, -1)
        return answers.permute(2, 0, 1, 3).reshape(tokens, shape.heads, -1)
