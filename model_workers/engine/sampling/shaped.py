"""Draws at positions that want more than the most probable token."""

from collections.abc import Sequence
from itertools import count
from typing import Final

import numpy as np
import torch
from torch import Tensor

from model_workers.engine.protocol import TokenLogprobs
from model_workers.engine.sampling.cuts import cut
from model_workers.engine.sampling.devices import column, on_device
from model_workers.engine.sampling.logprobs import packed, unpacked
from model_workers.engine.sampling.penalties import penalise
from model_workers.engine.sampling.position import Position
from model_workers.engine.sampling.uniform import uniform

NOTHING: Final = -1
"""Instead of a token: there is no distribution to draw from."""

Token = tuple[int, TokenLogprobs | None]


def draw_shaped(
    logits: Tensor, tokens: Tensor, positions: Sequence[Position], shaped: Sequence[int]
) -> list[Token]:
    """The tokens of all positions, drawn anew where ``shaped`` says.

    Args:
        tokens: the most probable ones, or `NOTHING`.
    """
    rows = on_device(np.array(shaped), logits.device)
    chosen = [positions[i] for i in shaped]
    scores = _tempered(_ruled(logits[rows], chosen), chosen)
    drawn = torch.where(tokens[rows] == NOTHING, NOTHING, _drawn(scores, chosen))
    tokens = tokens.index_copy(0, rows, drawn)
    return _read(tokens, scores, drawn, positions, shaped)


def _ruled(scores: Tensor, positions: Sequence[Position]) -> Tensor:
    """What the rules of each position make of its logits; changes ``scores``."""
    allowed = [(row, p.allowed) for row, p in enumerate(positions) if p.allowed is not None]
    if allowed:
        rows = on_device(np.array([row for row, _ in allowed]), scores.device)
        words = on_device(np.stack([mask for _, mask in allowed]), scores.device)
        scores[rows] = scores[rows].masked_fill(~_bits(words, scores.shape[-1]), -torch.inf)
    closed = [(row, token) for row, p in enumerate(positions) for token in p.closed]
    if closed:
        place = on_device(np.array(closed).T.copy(), scores.device)
        scores[place[0], place[1]] = -torch.inf
    penalise(scores, positions)
    return scores


def _bits(words: Tensor, size: int) -> Tensor:
    """Bits of int32 words (rows, words) as booleans (rows, size), least significant first; what lacks is false."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1).bool()[:, :size]
    return torch.nn.functional.pad(bits, (0, size - bits.shape[-1]))


def _tempered(scores: Tensor, positions: Sequence[Position]) -> Tensor:
    """Scores with the highest at 0, so that no temperature takes it to infinity; NaN where nothing is left."""
    temperature = [1.0 if p.greedy else p.sampling.temperature for p in positions]
    return (scores - scores.amax(dim=-1, keepdim=True)) / column(temperature, scores)


def _drawn(scores: Tensor, positions: Sequence[Position]) -> Tensor:
    highest, tokens = scores.max(dim=-1)
    tokens = torch.where(highest.isfinite(), tokens, NOTHING)
    random = [i for i, position in enumerate(positions) if not position.greedy]
    if not random:
        return tokens
    rows = on_device(np.array(random), scores.device)
    chosen = [positions[i] for i in random]
    drawn = _inverted(cut(scores[rows], [p.sampling for p in chosen]), chosen)
    return tokens.index_copy(0, rows, torch.where(tokens[rows] == NOTHING, NOTHING, drawn))


def _inverted(scores: Tensor, positions: Sequence[Position]) -> Tensor:
    """Where the cumulative distribution, in the order of token ids and in double precision, passes the random number.

    In that order a difference in the last bit of a probability moves the borders by as little; in the order of
    probability two nearly equal tokens could change places.
    """
    cumulated = scores.double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulated[:, -1:].contiguous()
    numbers = np.array([uniform(p.sampling.seed, p.index) for p in positions])
    targets = on_device(numbers, scores.device).unsqueeze(-1) * total
    # Rounding may put a target onto the total: the last token with a probability takes it.
    last = torch.searchsorted(cumulated, total, right=False)
    tokens = torch.searchsorted(cumulated, targets, right=True)
    return torch.minimum(tokens, last).squeeze(-1)


def _read(
    tokens: Tensor,
    scores: Tensor,
    drawn: Tensor,
    positions: Sequence[Position],
    shaped: Sequence[int],
) -> list[Token]:
    """Tokens and log-probabilities on the host, in one copy."""
    wanted = [i for i, place in enumerate(shaped) if positions[place].sampling.logprobs]
    if not wanted:
        return [(token_id, None) for token_id in tokens.tolist()]
    tops = [positions[shaped[i]].sampling.top_logprobs for i in wanted]
    rows = on_device(np.array(wanted), scores.device)
    pack = packed(scores[rows], drawn[rows], min(max(tops), scores.shape[-1]))
    values = torch.cat([tokens.double(), pack.flatten()]).tolist()
    found: list[Token] = [(int(token_id), None) for token_id in values[: len(positions)]]
    for start, i, top in zip(count(len(positions), pack.shape[-1]), wanted, tops, strict=False):
        logprobs = unpacked(values[start : start + pack.shape[-1]], top)
        found[shaped[i]] = (found[shaped[i]][0], logprobs)
    return found
