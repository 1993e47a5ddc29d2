"""The distribution at positions that need more than the most probable token, and draws from it.

In this order: biases; masks of the constraint and of `min_tokens`; repetition, presence and frequency penalties;
temperature; log-probabilities; top-k, top-p, min-p; draw. docs/use/sampling.md is the reference.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from model_workers.engine.devices import on_device
from model_workers.engine.protocol import Sampling, TokenLogprobs
from model_workers.engine.sampling.state import SamplingPosition, is_greedy

NO_TOKEN: Final = -1
"""Stands for a token where there is no distribution to draw from."""

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def draw(logits: Tensor, positions: Sequence[SamplingPosition]) -> tuple[Tensor, Tensor | None]:
    """Return the token of each position, or `NO_TOKEN`; and what `logprobs_of` reads."""
    # Most positions need only the most probable token.
    highest, tokens = logits.max(dim=-1)
    tokens = torch.where(highest.isfinite(), tokens, NO_TOKEN)
    shaped = [i for i, position in enumerate(positions) if not position.plain]
    if not shaped:
        return tokens, None
    rows = on_device(np.array(shaped), logits.device)
    chosen = [positions[i] for i in shaped]
    scores = _tempered(_ruled(logits[rows], chosen), chosen)
    drawn = torch.where(tokens[rows] == NO_TOKEN, NO_TOKEN, _drawn(scores, chosen))
    tokens = tokens.index_copy(0, rows, drawn)
    scored = [i for i, position in enumerate(chosen) if position.sampling.logprobs]
    if not scored:
        return tokens, None
    # Doubles hold token ids exactly, so that one tensor has the log-probability and the alternatives of each row.
    rows = on_device(np.array(scored), scores.device)
    logprobs = scores[rows].double().log_softmax(dim=-1)
    own = logprobs.gather(-1, drawn[rows].clamp_min(0).unsqueeze(-1))
    top = max(chosen[i].sampling.top_logprobs for i in scored)
    best = logprobs.topk(min(top, scores.shape[-1]), dim=-1)
    return tokens, torch.cat([own, best.values, best.indices.double()], dim=-1)


def logprobs_of(
    scores: Tensor | None, positions: Sequence[SamplingPosition]
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of positions that want them, from a tensor of `draw` on the host."""
    if scores is None:
        return [None] * len(positions)
    rows = iter(scores.tolist())
    return [
        _unpacked(next(rows), position.sampling.top_logprobs)
        if position.sampling.logprobs
        else None
        for position in positions
    ]


def _unpacked(values: Sequence[float], top: int) -> TokenLogprobs:
    """Return the log-probabilities of one row, with `top` alternatives at most and without excluded tokens."""
    most = len(values) // 2
    pairs = zip(values[1 : 1 + top], values[1 + most :], strict=False)
    alternatives = tuple((int(token_id), value) for value, token_id in pairs if value > -math.inf)
    return TokenLogprobs(values[0], alternatives)


def _ruled(scores: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Apply biases, constraints, `min_tokens` and penalties to `scores` in place; return them."""
    _bias(scores, positions)
    allowed = [(row, p.allowed) for row, p in enumerate(positions) if p.allowed is not None]
    if allowed:
        rows = on_device(np.array([row for row, _ in allowed]), scores.device)
        words = on_device(np.stack([mask for _, mask in allowed]), scores.device)
        scores[rows] = scores[rows].masked_fill(~_bits(words, scores.shape[-1]), -torch.inf)
    ruled_out = [(row, token) for row, p in enumerate(positions) for token in p.ruled_out]
    if ruled_out:
        place = on_device(np.array(ruled_out).T.copy(), scores.device)
        scores[place[0], place[1]] = -torch.inf
    _penalize(scores, positions)
    return scores


def _bits(words: Tensor, size: int) -> Tensor:
    """Return the bits of int32 words (rows, words), least significant first, as booleans (rows, size).

    Missing bits are false.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1).bool()[:, :size]
    return torch.nn.functional.pad(bits, (0, size - bits.shape[-1]))


def _bias(scores: Tensor, positions: Sequence[SamplingPosition]) -> None:
    """Add `logit_bias` to `scores` (positions, vocabulary; contiguous) in place."""
    size = scores.shape[-1]
    biased = [
        (row * size + token_id, bias)
        for row, position in enumerate(positions)
        for token_id, bias in position.sampling.logit_bias
        if token_id < size  # the model has no other
    ]
    if biased:
        places = on_device(np.array([place for place, _ in biased]), scores.device)
        scores.view(-1)[places] += on_device(
            np.array([bias for _, bias in biased], np.float32), scores.device
        )


def _penalize(scores: Tensor, positions: Sequence[SamplingPosition]) -> None:
    """Make tokens that an answer already has less likely; change `scores` (positions, vocabulary; contiguous) in place.

    The repetition penalty counts prompt and answer (Keskar et al., 2019: CTRL); presence and frequency penalties count
    only the answer, as in OpenAI's API.
    """
    size = scores.shape[-1]
    places, divisors, losses = [], [], []
    for row, position in enumerate(positions):
        if position.counts is None:
            continue
        tokens = np.fromiter(position.counts, np.int64)
        counts = np.fromiter(position.counts.values(), np.int64)
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


def _tempered(scores: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Divide scores by the temperature, with the highest at 0 so that none overflows; NaN where nothing is left."""
    temperature = [1.0 if is_greedy(p.sampling) else p.sampling.temperature for p in positions]
    return (scores - scores.amax(dim=-1, keepdim=True)) / _column(temperature, scores)


def _drawn(scores: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    highest, tokens = scores.max(dim=-1)
    tokens = torch.where(highest.isfinite(), tokens, NO_TOKEN)
    random = [i for i, position in enumerate(positions) if not is_greedy(position.sampling)]
    if not random:
        return tokens
    rows = on_device(np.array(random), scores.device)
    chosen = [positions[i] for i in random]
    drawn = _inverted(cut(scores[rows], [p.sampling for p in chosen]), chosen)
    return tokens.index_copy(0, rows, torch.where(tokens[rows] == NO_TOKEN, NO_TOKEN, drawn))


def cut(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Set `scores` (rows, vocabulary) to minus infinity for the tokens that top-k, top-p and min-p exclude.

    A cut is a threshold on the score: tokens of equal score stay or go together, so that the result does not depend on
    how a device breaks ties. The highest score of a row always stays. Nucleus sampling: Holtzman et al., 2020; min-p:
    Nguyen et al., 2024.
    """
    ranked = [i for i, s in enumerate(samplings) if s.top_k or s.top_p < 1]
    if ranked:
        rows = on_device(np.array(ranked), scores.device)
        lowest = _lowest_ranked(scores[rows], [samplings[i] for i in ranked])
        lowest = scores.new_full((len(samplings), 1), -torch.inf).index_copy(0, rows, lowest)
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if any(s.min_p for s in samplings):
        share = _column([s.min_p for s in samplings], scores)
        scores = scores.masked_fill(scores < scores.amax(-1, True) + share.log(), -torch.inf)
    return scores


def _lowest_ranked(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the lowest score that top-k and then top-p keep, shape (rows, 1)."""
    size = scores.shape[-1]
    top_k = _column([s.top_k or size for s in samplings], scores)
    # 2 is never reached, whatever the sum is rounded to.
    top_p = _column([s.top_p if s.top_p < 1 else 2.0 for s in samplings], scores)
    count = max(s.top_k or size for s in samplings)
    ordered = _ordered(scores, count)
    outside = torch.arange(ordered.shape[-1], device=scores.device) >= top_k
    share = ordered.masked_fill(outside, -torch.inf).double().softmax(dim=-1)
    # A token stays when those before it do not reach top_p yet.
    outside |= share.cumsum(dim=-1) - share >= top_p
    return ordered.masked_fill(outside, torch.inf).amin(dim=-1, keepdim=True)


def _ordered(scores: Tensor, count: int) -> Tensor:
    """Return the `count` highest scores of each row, highest first."""
    if count < scores.shape[-1]:
        return scores.topk(count, dim=-1).values
    if scores.device.type != "cpu":
        return scores.sort(dim=-1, descending=True).values
    # numpy sorts values with vector instructions, many times faster than torch sorts values and places.
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)


def _inverted(scores: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
    """Invert the cumulative distribution, in the order of token ids and in double precision, at the random numbers.

    In that order a difference in the last bit of a probability moves the borders by as little; in the order of
    probability two nearly equal tokens could change places.
    """
    # The highest score is 0. Single probabilities need no double precision, their sums do.
    cumulated = scores.exp().double().cumsum_(dim=-1)
    total = cumulated[:, -1:].contiguous()
    numbers = np.array([uniform(p.sampling.seed, p.index) for p in positions])
    targets = on_device(numbers, scores.device).unsqueeze(-1) * total
    # Rounding may put a target onto the total: the last token with a probability takes it.
    last = torch.searchsorted(cumulated, total, right=False)
    tokens = torch.searchsorted(cumulated, targets, right=True)
    return torch.minimum(tokens, last).squeeze(-1)


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) that depends only on (seed, index), with 53 bits."""
    state = _mixed((seed + _GAMMA) & _MASK)
    return (_mixed((state + (index + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def _mixed(state: int) -> int:
    """Return the output function of splitmix64.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
    """
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return `values` in float32, shape (rows, 1), on the device of `like`."""
    return on_device(np.array(values, np.float32), like.device).unsqueeze(-1)
