"""Draws the next tokens of sequences, all sequences of a step together.

Positions that need only the most probable token are one argmax over the logits; `distribution` computes the others. The
host waits for the device once, when all is drawn (`PendingDraw.read`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import torch
from torch import Tensor

from model_workers.constraints import ConstraintCompiler, MatcherError, TokenMatcher
from model_workers.engine.protocol import (
    SequenceSpec,
    TokenLogprobs,
)
from model_workers.engine.sampling.distribution import NO_TOKEN, Token, draw_shaped, unpack
from model_workers.engine.sampling.state import SamplingPosition, SamplingState
from sluice.errors import InvalidRequest

NO_DISTRIBUTION: Final = "the model's output is not a number"


@dataclass(slots=True)
class DrawRequest:
    """What to draw for one sequence: its next token and, while the drafted tokens are right, one after each of them.

    Attributes:
        drafted: drafted next tokens. The caller keeps the sequence's limit: up to `1 + len(drafted)`
            tokens are drawn.
    """

    state: SamplingState
    drafted: Sequence[int] = ()


@dataclass(slots=True)
class DrawResult:
    """What was drawn for one sequence.

    Attributes:
        token_ids: at least one, unless there is an error: what draws without drafts would have given one by one, since
            a drafted token is taken only for being the one that is drawn. Nothing follows a stop token.
        logprobs: one per token when asked for, else empty.
        error: one sentence when the sequence cannot continue after `token_ids`.
        field: the path of the field of the public request that is to blame for the error; empty: the model is.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    field: str = ""


class PendingDraw:
    """Draws that the device may still compute, on their way to the host.

    Attributes:
        tokens: of every position, on the device; `NO_TOKEN` where there is no distribution.
    """

    def __init__(
        self, tokens: Tensor, values: Tensor, take: Callable[[list[Any]], list[DrawResult]]
    ) -> None:
        """`take`: makes results of `values` on the host."""
        self.tokens = tokens
        self._take = take
        # Into pinned memory, without waiting.
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[DrawResult]:
        """Waits for the draws, and appends what was drawn to the sequences' states; once. See `Sampler.draw`."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._take(self._values.tolist())


class Sampler:
    """Draws for the sequences of one engine. Not thread-safe but for `matcher`. Holds no sequences: each has its
    `SamplingState`.

    Attributes:
        prepared: matchers of sequences that are opened next, by request.
    """

    def __init__(self, constraints: ConstraintCompiler | None = None) -> None:
        self._constraints = constraints
        self.prepared: dict[str, TokenMatcher] = {}

    def open(self, sequence: SequenceSpec) -> SamplingState:
        """The state of a sequence after `sequence.produced`; it continues as if those had been drawn here.

        Raises:
            InvalidRequest: its constraint cannot be held here, or `produced` breaks it.
        """
        if not sequence.sampling.constrained:
            return SamplingState(sequence, None)
        return SamplingState(
            sequence, self.prepared.pop(sequence.request_id, None) or self.matcher(sequence)
        )

    def matcher(self, sequence: SequenceSpec) -> TokenMatcher:
        """The matcher of a sequence with a constraint after `sequence.produced`; raises as `open`. From any thread."""
        if self._constraints is None:
            raise InvalidRequest("this worker has no tokenizer, which a constraint needs")
        matcher = self._constraints.open(sequence.sampling)
        try:
            taken = matcher.take(sequence.produced)
        except MatcherError as error:
            raise InvalidRequest.of(sequence.sampling.constraint_field, str(error)) from error
        if taken < len(sequence.produced):
            raise InvalidRequest("the tokens produced so far do not match the constraint")
        return matcher

    def draw(self, logits: Tensor, requests: Sequence[DrawRequest]) -> list[DrawResult]:
        """Draws for each request, and appends what was drawn to its sequence's state.

        Args:
            logits: float32, shape (sum of `1 + len(drafted)`, vocabulary), in the order of the requests: after the
                sequence's last token, then after each drafted one. Not changed.

        Returns:
            One for each request. A sequence whose logits are no distribution has an error, and does not affect the
            others.
        """
        return self.begin(logits, requests).read()

    @torch.inference_mode()
    def begin(self, logits: Tensor, requests: Sequence[DrawRequest]) -> PendingDraw:
        """Begins to draw; as `draw`, but does not wait for the device.

        Sequences without drafts whose states do not read tokens (`SamplingState.reads_tokens`) may begin their next
        draw before this one is read.
        """
        if all(request.state.is_plain and not request.drafted for request in requests):
            tokens = values = _most_probable(logits)
            take = partial(_greedy, requests)
        else:
            places = [list(request.state.positions(request.drafted)) for request in requests]
            tokens, values = _tokens(logits, list(chain.from_iterable(places)))
            take = partial(_shaped, requests, places)
        for request in requests:
            request.state.begin()
        return PendingDraw(tokens, values, take)


def _most_probable(logits: Tensor) -> Tensor:
    """The most probable token of each sequence, or `NO_TOKEN`."""
    highest, tokens = logits.max(dim=-1)
    return torch.where(highest.isfinite(), tokens, NO_TOKEN)


def _greedy(requests: Sequence[DrawRequest], tokens: Sequence[int]) -> list[DrawResult]:
    return [_one(request.state, token) for request, token in zip(requests, tokens, strict=True)]


def _one(sequence: SamplingState, token_id: int) -> DrawResult:
    if token_id == NO_TOKEN:
        return DrawResult(error=NO_DISTRIBUTION)
    sequence.take((token_id,))
    return DrawResult((token_id,))


def _tokens(logits: Tensor, positions: Sequence[SamplingPosition]) -> tuple[Tensor, Tensor]:
    """The token of every position, and what `unpack` reads."""
    tokens = _most_probable(logits)
    shaped = [i for i, position in enumerate(positions) if not position.plain]
    return draw_shaped(logits, tokens, positions, shaped) if shaped else (tokens, tokens)


def _shaped(
    requests: Sequence[DrawRequest],
    places: Sequence[Sequence[SamplingPosition]],
    values: Sequence[float],
) -> list[DrawResult]:
    tokens = iter(unpack(values, list(chain.from_iterable(places))))
    return [
        _taken(request, sequence, list(islice(tokens, len(sequence))))
        for request, sequence in zip(requests, places, strict=True)
    ]


def _taken(
    request: DrawRequest, positions: Sequence[SamplingPosition], tokens: Sequence[Token]
) -> DrawResult:
    """The accepted tokens of a sequence's positions: up to the first that is not the drafted one."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    error = field = ""
    drafted = [*request.drafted, None]
    for position, (token_id, logprob), draft in zip(positions, tokens, drafted, strict=True):
        if position.error:
            error, field = position.error, request.state.constraint_field
            break
        if token_id == NO_TOKEN:
            error = NO_DISTRIBUTION
            break
        token_ids.append(token_id)
        if logprob is not None:
            logprobs.append(logprob)
        if token_id != draft or token_id in request.state.stop_token_ids:
            break
    try:
        request.state.take(token_ids)
    except MatcherError as reason:
        error, field = str(reason), request.state.constraint_field
    return DrawResult(tuple(token_ids), tuple(logprobs), error, field)
