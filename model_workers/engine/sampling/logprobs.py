"""Log-probabilities on their way to the host."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from model_workers.engine.protocol import TokenLogprobs


def packed(scores: Tensor, tokens: Tensor, top: int) -> Tensor:
    """What `unpacked` reads, in doubles, which hold token ids exactly: shape (rows, 1 + 2 * top).

    Args:
        scores: of the distribution, shape (rows, vocabulary).
        tokens: the drawn ones; what is below 0 counts as 0.
    """
    logprobs = scores.double().log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens.clamp_min(0).unsqueeze(-1))
    best = logprobs.topk(top, dim=-1)
    return torch.cat([own, best.values, best.indices.double()], dim=-1)


def unpacked(values: Sequence[float], top: int) -> TokenLogprobs:
    """One row of `packed`, cut to ``top`` alternatives. Tokens that cannot come are none."""
    most = len(values) // 2
    pairs = zip(values[1 : 1 + top], values[1 + most :], strict=False)
    found = tuple((int(token_id), value) for value, token_id in pairs if value > -math.inf)
    return TokenLogprobs(values[0], found)
