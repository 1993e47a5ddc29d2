"""Draws the next tokens of rows, all rows of a step together.

The order of operations at each position: what the constraint and ``min_tokens`` rule out; repetition, presence and
frequency penalties; temperature; log-probabilities; top-k, top-p, min-p; draw. docs/sampling.md is the reference.

Positions that want nothing but the most probable token are one argmax over the logits; only the others are worked on.
The host waits for the device once, when all is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from model_workers.engine.protocol import RowInvalid, RowSpec, TokenLogprobs
from model_workers.engine.sampling.matcher import Grammars, MatcherError
from model_workers.engine.sampling.position import Position
from model_workers.engine.sampling.row import RowDraws
from model_workers.engine.sampling.shaped import NOTHING, Token, draw_shaped

NO_DISTRIBUTION: Final = "the model's output is not a number"


@dataclass(frozen=True, slots=True)
class Ask:
    """What to draw for one row: its next token and, while the drafted tokens are right, one behind each of them.

    Attributes:
        drafted: tokens that are guessed to come next. The caller keeps the row's limit: up to ``1 + len(drafted)``
            tokens are drawn.
    """

    row: RowDraws
    drafted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn for one row.

    Attributes:
        token_ids: at least one, unless there is an error: what draws without drafts would have given one by one, since
            a drafted token is taken only for being the one that is drawn. Nothing follows a stop token.
        logprobs: one per token when asked for, else empty.
        error: one sentence when the row cannot go on behind ``token_ids``.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""


class Sampler:
    """Draws for the rows of one engine. Not thread-safe. It holds no rows: who drops a `RowDraws` is done with it."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars

    def open(self, row: RowSpec) -> RowDraws:
        """The state of a row behind ``row.produced``: whoever drew those would draw the same from here on.

        Raises:
            RowInvalid: its constraint cannot be held here, or ``produced`` breaks it.
        """
        if row.sampling.json_schema is None and row.sampling.regex is None:
            return RowDraws(row, None)
        if self._grammars is None:
            raise RowInvalid("this worker has no tokenizer, which a constraint needs")
        matcher = self._grammars.open(row.sampling)
        try:
            taken = matcher.take(row.produced)
        except MatcherError as error:
            raise RowInvalid(str(error)) from error
        if taken < len(row.produced):
            raise RowInvalid("the tokens produced so far do not match the constraint")
        return RowDraws(row, matcher)

    @torch.inference_mode()
    def draw(self, logits: Tensor, asks: Sequence[Ask]) -> list[Drawn]:
        """Draws for each ask, and moves its row on behind what was drawn.

        Args:
            logits: float32, shape (sum of ``1 + len(drafted)``, vocabulary), in the order of the asks: behind the row's
                last token, then behind each drafted one. Left as they are.

        Returns:
            One for each ask. A row whose logits are no distribution has an error; the others do not notice.
        """
        if all(ask.row.is_plain and not ask.drafted for ask in asks):
            tokens = _most_probable(logits).tolist()
            return [_greedy(ask.row, token) for ask, token in zip(asks, tokens, strict=True)]
        return self._draw(logits, asks)

    def _draw(self, logits: Tensor, asks: Sequence[Ask]) -> list[Drawn]:
        places = [list(ask.row.positions(ask.drafted)) for ask in asks]
        tokens = iter(_tokens(logits, [position for row in places for position in row]))
        return [
            _taken(ask, row, list(islice(tokens, len(row))))
            for ask, row in zip(asks, places, strict=True)
        ]


def _most_probable(logits: Tensor) -> Tensor:
    """The most probable token of each row, or `NOTHING`."""
    highest, tokens = logits.max(dim=-1)
    return torch.where(highest.isfinite(), tokens, NOTHING)


def _greedy(row: RowDraws, token_id: int) -> Drawn:
    if token_id == NOTHING:
        return Drawn(error=NO_DISTRIBUTION)
    row.take((token_id,))
    return Drawn((token_id,))


def _tokens(logits: Tensor, positions: Sequence[Position]) -> list[Token]:
    """The token of every position."""
    tokens = _most_probable(logits)
    shaped = [i for i, position in enumerate(positions) if not position.plain]
    if shaped:
        return draw_shaped(logits, tokens, positions, shaped)
    return [(token_id, None) for token_id in tokens.tolist()]


def _taken(ask: Ask, positions: Sequence[Position], tokens: Sequence[Token]) -> Drawn:
    """What of the tokens at the places of a row is true: up to the first that was not drafted."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    error = ""
    drafted = [*ask.drafted, None]
    for position, (token_id, logprob), draft in zip(positions, tokens, drafted, strict=True):
        error = position.error or (NO_DISTRIBUTION if token_id == NOTHING else "")
        if error:
            break
        token_ids.append(token_id)
        if logprob is not None:
            logprobs.append(logprob)
        if token_id != draft or token_id in ask.row.stop_token_ids:
            break
    try:
        ask.row.take(token_ids)
    except MatcherError as reason:
        error = str(reason)
    return Drawn(tuple(token_ids), tuple(logprobs), error)
