"""Draws the next tokens of rows, all rows of a step together.

Positions that need only the most probable token are one argmax over the logits; `distribution` computes the others. The
host waits for the device once, when all is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from model_workers.engine.protocol import RowInvalid, RowSpec, TokenLogprobs
from model_workers.engine.sampling.constraints import ConstraintCompiler, MatcherError
from model_workers.engine.sampling.distribution import NO_TOKEN, Token, draw_shaped
from model_workers.engine.sampling.state import SamplingPosition, SamplingState

NO_DISTRIBUTION: Final = "the model's output is not a number"


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """What to draw for one row: its next token and, while the drafted tokens are right, one after each of them.

    Attributes:
        drafted: drafted next tokens. The caller keeps the row's limit: up to ``1 + len(drafted)``
            tokens are drawn.
    """

    row: SamplingState
    drafted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class DrawResult:
    """What was drawn for one row.

    Attributes:
        token_ids: at least one, unless there is an error: what draws without drafts would have given one by one, since
            a drafted token is taken only for being the one that is drawn. Nothing follows a stop token.
        logprobs: one per token when asked for, else empty.
        error: one sentence when the row cannot continue after ``token_ids``.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""


class Sampler:
    """Draws for the rows of one engine. Not thread-safe. Holds no rows: each has its `SamplingState`."""

    def __init__(self, constraints: ConstraintCompiler | None = None) -> None:
        self._constraints = constraints

    def open(self, row: RowSpec) -> SamplingState:
        """The state of a row after ``row.produced``; it continues as if those had been drawn here.

        Raises:
            RowInvalid: its constraint cannot be held here, or ``produced`` breaks it.
        """
        if not row.sampling.constrained:
            return SamplingState(row, None)
        if self._constraints is None:
            raise RowInvalid("this worker has no tokenizer, which a constraint needs")
        matcher = self._constraints.open(row.sampling)
        try:
            taken = matcher.take(row.produced)
        except MatcherError as error:
            raise RowInvalid(str(error)) from error
        if taken < len(row.produced):
            raise RowInvalid("the tokens produced so far do not match the constraint")
        return SamplingState(row, matcher)

    @torch.inference_mode()
    def draw(self, logits: Tensor, requests: Sequence[DrawRequest]) -> list[DrawResult]:
        """Draws for each request, and appends what was drawn to its row's state.

        Args:
            logits: float32, shape (sum of ``1 + len(drafted)``, vocabulary), in the order of the requests: after the
                row's last token, then after each drafted one. Not changed.

        Returns:
            One for each request. A row whose logits are no distribution has an error, and does not affect the others.
        """
        if all(request.row.is_plain and not request.drafted for request in requests):
            tokens = _most_probable(logits).tolist()
            return [
                _greedy(request.row, token) for request, token in zip(requests, tokens, strict=True)
            ]
        return self._draw(logits, requests)

    def _draw(self, logits: Tensor, requests: Sequence[DrawRequest]) -> list[DrawResult]:
        places = [list(request.row.positions(request.drafted)) for request in requests]
        tokens = iter(_tokens(logits, [position for row in places for position in row]))
        return [
            _taken(request, row, list(islice(tokens, len(row))))
            for request, row in zip(requests, places, strict=True)
        ]


def _most_probable(logits: Tensor) -> Tensor:
    """The most probable token of each row, or `NO_TOKEN`."""
    highest, tokens = logits.max(dim=-1)
    return torch.where(highest.isfinite(), tokens, NO_TOKEN)


def _greedy(row: SamplingState, token_id: int) -> DrawResult:
    if token_id == NO_TOKEN:
        return DrawResult(error=NO_DISTRIBUTION)
    row.take((token_id,))
    return DrawResult((token_id,))


def _tokens(logits: Tensor, positions: Sequence[SamplingPosition]) -> list[Token]:
    """The token of every position."""
    tokens = _most_probable(logits)
    shaped = [i for i, position in enumerate(positions) if not position.plain]
    if shaped:
        return draw_shaped(logits, tokens, positions, shaped)
    return [(token_id, None) for token_id in tokens.tolist()]


def _taken(
    request: DrawRequest, positions: Sequence[SamplingPosition], tokens: Sequence[Token]
) -> DrawResult:
    """The accepted tokens of a row's positions: up to the first that is not the drafted one."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    error = ""
    drafted = [*request.drafted, None]
    for position, (token_id, logprob), draft in zip(positions, tokens, drafted, strict=True):
        error = position.error or (NO_DISTRIBUTION if token_id == NO_TOKEN else "")
        if error:
            break
        token_ids.append(token_id)
        if logprob is not None:
            logprobs.append(logprob)
        if token_id != draft or token_id in request.row.stop_token_ids:
            break
    try:
        request.row.take(token_ids)
    except MatcherError as reason:
        error = str(reason)
    return DrawResult(tuple(token_ids), tuple(logprobs), error)
