"""Draws the next token of each row.

Order: repetition penalty (over prompt and answer), temperature, top-k, top-p, draw; log-probabilities are taken after
the temperature and before top-k. Temperature 0 takes the most probable token and divides by nothing.

A draw depends on (seed, index) alone: splitmix64 makes the uniform number, and the token is where the cumulative
distribution, in the order of token ids, passes it. In that order a difference in the last bit of a probability moves
the borders by as little; in the order of probability two nearly equal tokens could change places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from model_workers.engine.protocol import Sampling, TokenLogprobs

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """What is to be drawn for one row.

    Attributes:
        index: of the token in the answer.
        seen: which tokens occurred, bool[vocabulary]; needed when there is a repetition penalty.
    """

    sampling: Sampling
    index: int
    seen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) alone, 53 bits of it."""
    state = _mixed((seed + _GAMMA) & _MASK)
    return (_mixed((state + (index + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def _mixed(state: int) -> int:
    """The output function of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn | None]:
    """One token per row of ``logits`` [rows, vocabulary]; None where they make no distribution (NaN, infinity)."""
    logits = logits.float()
    highest, greedy = logits.max(dim=-1)
    finite = torch.isfinite(highest).tolist()
    found = [
        Drawn(token_id) if fine else None
        for fine, token_id in zip(finite, greedy.tolist(), strict=True)
    ]
    shaped = [i for i, draw in enumerate(draws) if finite[i] and not _is_plain(draw.sampling)]
    if shaped:
        drawn = _sample_shaped(logits[shaped], [draws[i] for i in shaped])
        for i, token in zip(shaped, drawn, strict=True):
            found[i] = token
    return found


def _is_plain(sampling: Sampling) -> bool:
    """Whether the most probable token is all that is asked for."""
    greedy = sampling.temperature == 0 and sampling.repetition_penalty == 1
    return greedy and not sampling.logprobs


def _sample_shaped(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    scores = _tempered(_penalised(logits, draws), draws)
    tokens = scores.argmax(dim=-1)
    random = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random:
        tokens[random] = _drawn(scores[random], [draws[i] for i in random])
    return _with_logprobs(scores, tokens, draws)


def _penalised(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    rows = [i for i, draw in enumerate(draws) if draw.sampling.repetition_penalty != 1]
    if not rows:
        return logits
    seen = torch.stack([_seen(draws[i]) for i in rows])
    penalty = _column([draws[i].sampling.repetition_penalty for i in rows], logits)
    before = logits[rows]
    after = torch.where(before > 0, before / penalty, before * penalty)
    logits = logits.clone()
    logits[rows] = torch.where(seen, after, before)
    return logits


def _seen(draw: Draw) -> Tensor:
    assert draw.seen is not None, "a repetition penalty needs the tokens that occurred"
    return draw.seen


def _tempered(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    return scores / _column([draw.sampling.temperature or 1.0 for draw in draws], scores)


def _drawn(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The drawn tokens, by inverting the cumulative distribution in double precision."""
    probabilities = _filtered(scores, draws).double().softmax(dim=-1)
    cumulated = probabilities.cumsum(dim=-1)
    total = cumulated[:, -1:].contiguous()
    numbers = [uniform(draw.sampling.seed, draw.index) for draw in draws]
    targets = _column(numbers, cumulated) * total
    # Rounding may put a target onto the total: the last token with a probability takes it.
    last = torch.searchsorted(cumulated, total, right=False)
    tokens = torch.searchsorted(cumulated, targets, right=True)
    return torch.minimum(tokens, last).squeeze(-1)


def _filtered(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Minus infinity for what top-k and then top-p leave out."""
    if all(draw.sampling.top_k == 0 and draw.sampling.top_p >= 1 for draw in draws):
        return scores
    size = scores.shape[-1]
    top_k = _column([draw.sampling.top_k or size for draw in draws], scores)
    top_p = _column([p if (p := draw.sampling.top_p) < 1 else 2.0 for draw in draws], scores)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    outside = torch.arange(size, device=scores.device) >= top_k
    share = ordered.masked_fill(outside, -torch.inf).double().softmax(dim=-1)
    # A token stays when those before it do not reach top_p yet.
    outside |= share.cumsum(dim=-1) - share >= top_p
    return scores.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)


def _with_logprobs(scores: Tensor, tokens: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    token_ids = tokens.tolist()
    found = [Drawn(token_id) for token_id in token_ids]
    rows = [i for i, draw in enumerate(draws) if draw.sampling.logprobs]
    if not rows:
        return found
    logprobs = scores[rows].log_softmax(dim=-1)
    most = min(max(draws[i].sampling.top_logprobs for i in rows), scores.shape[-1])
    values, ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
    own = logprobs.gather(-1, tokens[rows, None]).squeeze(-1).tolist()
    for place, i in enumerate(rows):
        top = list(zip(ids[place], values[place], strict=True))[: draws[i].sampling.top_logprobs]
        found[i] = Drawn(token_ids[i], TokenLogprobs(own[place], tuple(top)))
    return found


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
