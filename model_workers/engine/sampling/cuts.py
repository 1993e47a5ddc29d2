"""What top-k, top-p and min-p leave of the distribution.

A cut is a threshold on the score: tokens of exactly the same score stay or go together, so the outcome does not depend
on how a device breaks ties.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_workers.engine.protocol import Sampling
from model_workers.engine.sampling.devices import column, on_device


def cut(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """``scores`` (rows, vocabulary) with minus infinity for the tokens that are left out.

    The highest score of a row is never left out. Nucleus sampling: Holtzman et al., 2020; min-p: Nguyen et al., 2024.
    """
    ranked = [i for i, s in enumerate(samplings) if s.top_k or s.top_p < 1]
    if ranked:
        rows = on_device(np.array(ranked), scores.device)
        lowest = _lowest_ranked(scores[rows], [samplings[i] for i in ranked])
        lowest = scores.new_full((len(samplings), 1), -torch.inf).index_copy(0, rows, lowest)
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if any(s.min_p for s in samplings):
        share = column([s.min_p for s in samplings], scores)
        scores = scores.masked_fill(scores < scores.amax(-1, True) + share.log(), -torch.inf)
    return scores


def _lowest_ranked(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The lowest score that top-k and then top-p keep, shape (rows, 1)."""
    size = scores.shape[-1]
    ordered = _ordered(scores, max(s.top_k or size for s in samplings))
    top_k = column([s.top_k or size for s in samplings], scores)
    # 2 is never reached, whatever the sum is rounded to.
    top_p = column([s.top_p if s.top_p < 1 else 2.0 for s in samplings], scores)
    outside = torch.arange(ordered.shape[-1], device=scores.device) >= top_k
    share = ordered.masked_fill(outside, -torch.inf).double().softmax(dim=-1)
    # A token stays when those before it do not reach top_p yet.
    outside |= share.cumsum(dim=-1) - share >= top_p
    return ordered.masked_fill(outside, torch.inf).amin(dim=-1, keepdim=True)


def _ordered(scores: Tensor, count: int) -> Tensor:
    """The ``count`` highest scores of each row, highest first."""
    if count < scores.shape[-1]:
        return scores.topk(count, dim=-1).values
    if scores.device.type == "cpu":
        # numpy sorts values with vector instructions, many times faster than torch sorts values and places.
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values
