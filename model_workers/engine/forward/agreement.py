"""Compares the first tokens of a model over the paged cache with transformers' own, before it is served.

Some decoders run over the paged cache and compute something else: DiffLlama attends twice per layer, BART's decoder
counts positions by itself. Only their numbers show it. Two prompts are computed in one step and decoded token by token,
as the engine does; then transformers computes both, with their answers, in one pass.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from model_workers.engine.paged_model import PagedModel, SequenceChunk
from sluice.settings import SettingsError
from sluice.settings.models import GENERATE

ROWS: Final = 2
"""Number of prompts."""
TOKENS: Final = 16
"""Maximum number of tokens of each answer that are compared."""
PROMPT_TOKENS: Final = 12
"""Maximum length of the prompts."""
FAST_BYTES: Final = 6e8
"""Weights that a CPU reads `TOKENS` times within about a second; of larger models fewer tokens are compared."""
TOLERANCES: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Maximum difference of logits by rounding, as a share of their range."""


def tokens_compared(weight_bytes: float, device: torch.device, context_tokens: int) -> int:
    """Return how many tokens of each answer to compare: at least one that is decoded."""
    affordable = TOKENS if device.type != "cpu" else int(TOKENS * FAST_BYTES / weight_bytes)
    return max(2, min(TOKENS, affordable, context_tokens // 2))


def blocks_compared(block_tokens: int) -> int:
    """Return how many blocks of the cache the comparison takes."""
    return ROWS * -(-(PROMPT_TOKENS + TOKENS) // block_tokens)


def check_agreement(
    name: str,
    paged: PagedModel,
    reference: Callable[[Tensor], Tensor],
    tokens: int,
    tolerance: float,
) -> None:
    """Compare the first `tokens` logits over the paged cache with those of transformers.

    Args:
        name: Name of the model, for the error.
        paged: The model over the paged cache.
        reference: Returns transformers' logits [rows, tokens, vocabulary] of token ids [rows, tokens].
        tokens: Number of tokens to compare.
        tolerance: See `TOLERANCES`.

    Raises:
        SettingsError: They differ.
    """
    length = min(PROMPT_TOKENS, paged.context_tokens // 2)
    rows = [
        [(7 * place + 3 + 11 * row) % paged.vocab_size for place in range(length)]
        for row in range(ROWS)
    ]
    logits = torch.stack(list(_decoded(paged, rows, tokens)), 1)
    reference_logits = (
        reference(torch.tensor(rows)[:, :-1])[:, length - 1 :].float().to(logits.device)
    )
    wrong = ~_agrees(logits, reference_logits, tolerance).all(0)
    if wrong.any():
        raise SettingsError(
            f"{name}: the paged engine computes it otherwise than transformers, from token {int(wrong.nonzero()[0])} "
            f"of a trial on; {GENERATE}"
        )


def _decoded(paged: PagedModel, rows: list[list[int]], tokens: int) -> Iterator[Tensor]:
    """Decode greedily; yield the logits of each step, [rows, vocabulary], and append the tokens to `rows`."""
    blocks = paged.num_blocks // len(rows)
    tables = [range(row * blocks, (row + 1) * blocks) for row in range(len(rows))]
    pending: Sequence[Sequence[int]] = [list(row) for row in rows]
    for _ in range(tokens):
        chunks = [
            SequenceChunk(new, len(row) - len(new), table, 1)
            for new, row, table in zip(pending, rows, tables, strict=True)
        ]
        logits = paged.forward(chunks).clone()
        yield logits
        pending = logits.argmax(-1)[:, None].tolist()
        for row, new in zip(rows, pending, strict=True):
            row.extend(new)


def _agrees(ours: Tensor, theirs: Tensor, tolerance: float) -> Tensor:
    """Return whether logits are equal up to rounding, [rows, tokens]."""
    size = theirs.amax(-1) - theirs.amin(-1)
    return (ours - theirs).abs().amax(-1) <= tolerance * size
