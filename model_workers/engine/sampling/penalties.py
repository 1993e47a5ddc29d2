"""Makes tokens that a row already has less likely.

The repetition penalty counts prompt and answer (Keskar et al., 2019: CTRL); presence and frequency penalties count the
answer alone, as in OpenAI's API.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_workers.engine.sampling.devices import on_device
from model_workers.engine.sampling.position import Position


def penalise(scores: Tensor, positions: Sequence[Position]) -> None:
    """Changes ``scores`` (positions, vocabulary; contiguous) in place."""
    size = scores.shape[-1]
    places, divisors, losses = [], [], []
    for row, position in enumerate(positions):
        if position.occurrences is None:
            continue
        tokens, counts = position.occurrences.tokens, position.occurrences.counts
        sampling = position.sampling
        places.append(tokens + row * size)
        divisors.append(np.full(len(tokens), sampling.repetition_penalty, np.float32))
        present = sampling.presence_penalty * (counts > 0)
        losses.append((present + sampling.frequency_penalty * counts).astype(np.float32))
    if not places:
        return
    where = on_device(np.concatenate(places), scores.device)
    divisor = on_device(np.concatenate(divisors), scores.device)
    loss = on_device(np.concatenate(losses), scores.device)
    flat = scores.view(-1)
    before = flat[where]
    flat[where] = torch.where(before > 0, before / divisor, before * divisor) - loss
