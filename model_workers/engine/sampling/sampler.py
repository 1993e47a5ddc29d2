"""Draws the next tokens of sequences, for all sequences of a step together.

Positions that need only the most probable token are one argmax over the logits; `distribution` computes the others. The
host waits for the device once, when all is drawn (`PendingDraw.read`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

import torch
from torch import Tensor

from model_workers.constraints import ConstraintCompiler, MatcherError, TokenMatcher
from model_workers.engine.protocol import SequenceSpec, TokenLogprobs
from model_workers.engine.sampling.distribution import NO_TOKEN, draw, logprobs_of
from model_workers.engine.sampling.state import SamplingPosition, SamplingState
from sluice.errors import InvalidRequest

NO_DISTRIBUTION: Final = "the model's output is not a number"
"""Error of a sequence whose logits are not finite."""

Token = tuple[int, TokenLogprobs | None]


@dataclass(slots=True)
class DrawRequest:
    """What to draw for one sequence: its next token and, while the drafted tokens are right, one after each of them.

    Attributes:
        drafted: Drafted next tokens. Up to `1 + len(drafted)` tokens are drawn; the caller keeps the sequence's limit.
    """

    state: SamplingState
    drafted: Sequence[int] = ()


@dataclass(slots=True)
class DrawResult:
    """The tokens drawn for one sequence.

    Attributes:
        token_ids: At least one, unless there is an error, and the same as without drafts, because a drafted token is
            accepted only if it is drawn. Nothing follows a stop token.
        logprobs: One per token if requested, else empty.
        error: One sentence if the sequence cannot continue after `token_ids`.
        field: Path of the public request's field that caused the error; empty: the model did.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    field: str = ""


class PendingDraw:
    """Draws that the device may still compute, on their way to the host.

    Attributes:
        tokens: Tokens of every position, on the device; `NO_TOKEN` where there is no distribution.
    """

    def __init__(
        self,
        requests: Sequence[DrawRequest],
        places: Sequence[Sequence[SamplingPosition]],
        tokens: Tensor,
        scores: Tensor | None,
    ) -> None:
        """Copy `tokens` and the `scores` of `distribution.draw` to the host in the background.

        - `places`: Positions by request; empty: each request has one plain position.
        """
        self.tokens = tokens
        self._requests, self._places = requests, places
        # Into pinned memory, without waiting.
        self._values = tokens.to("cpu", non_blocking=True)
        self._scores = None if scores is None else scores.to("cpu", non_blocking=True)
        make_event: Any = torch.cuda.Event
        self._copied = make_event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[DrawResult]:
        """Wait for the draws and append them to the sequences' states, once. See `Sampler.draw`."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids = self._values.tolist()
        if not self._places:
            pairs = zip(self._requests, token_ids, strict=True)
            return [_most_probable(request.state, token_id) for request, token_id in pairs]
        logprobs = logprobs_of(self._scores, list(chain.from_iterable(self._places)))
        tokens = zip(token_ids, logprobs, strict=True)
        return [
            _accept_tokens(request, positions, list(islice(tokens, len(positions))))
            for request, positions in zip(self._requests, self._places, strict=True)
        ]


class Sampler:
    """Draws for the sequences of one engine; each has its own `SamplingState`. Only `matcher` is thread-safe.

    Attributes:
        prepared: Matchers of sequences that are opened next, by request.
    """

    def __init__(self, constraints: ConstraintCompiler | None = None) -> None:
        self._constraints = constraints
        self.prepared: dict[str, TokenMatcher] = {}

    def open(self, sequence: SequenceSpec) -> SamplingState:
        """Return the state of a sequence after `sequence.produced`, as if those tokens had been drawn here.

        Raises:
            InvalidRequest: Its constraint cannot be enforced here, or `produced` violates it.
        """
        if not sequence.sampling.constrained:
            return SamplingState(sequence, None)
        prepared = self.prepared.pop(sequence.request_id, None)
        return SamplingState(sequence, prepared or self.matcher(sequence))

    def matcher(self, sequence: SequenceSpec) -> TokenMatcher:
        """Return the matcher of a constrained sequence after `sequence.produced`. Thread-safe; raises as `open`."""
        if self._constraints is None:
            raise InvalidRequest("this worker has no tokenizer, which a constraint needs")
        matcher = self._constraints.open(sequence.sampling)
        try:
            accepted = matcher.take(sequence.produced)
        except MatcherError as error:
            raise InvalidRequest.of(sequence.sampling.constraint_field, str(error)) from error
        if accepted < len(sequence.produced):
            raise InvalidRequest("the tokens produced so far do not match the constraint")
        return matcher

    def draw(self, logits: Tensor, requests: Sequence[DrawRequest]) -> list[DrawResult]:
        """Draw for each request, and append the tokens to the sequence's state.

        - `logits`: float32, shape (sum of `1 + len(drafted)`, vocabulary), in the order of the requests: after the
          sequence's last token, then after each drafted one. Not changed.

        Returns:
            One result per request. Logits that are no distribution give an error for their sequence alone.
        """
        return self.begin(logits, requests).read()

    @torch.inference_mode()
    def begin(self, logits: Tensor, requests: Sequence[DrawRequest]) -> PendingDraw:
        """Begin to draw without waiting for the device; otherwise as `draw`.

        Sequences without drafts whose states do not read tokens (`SamplingState.reads_tokens`) may begin their next
        draw before this one is read.
        """
        places: list[list[SamplingPosition]] = []
        # Nearly every step of greedy sequences: nothing is made for their positions.
        if not all(request.state.is_plain and not request.drafted for request in requests):
            places = [list(request.state.positions(request.drafted)) for request in requests]
        tokens, scores = draw(logits, list(chain.from_iterable(places)))
        for request in requests:
            request.state.begin()
        return PendingDraw(requests, places, tokens, scores)


def _most_probable(state: SamplingState, token_id: int) -> DrawResult:
    if token_id == NO_TOKEN:
        return DrawResult(error=NO_DISTRIBUTION)
    state.take((token_id,))
    return DrawResult((token_id,))


def _accept_tokens(
    request: DrawRequest, positions: Sequence[SamplingPosition], tokens: Sequence[Token]
) -> DrawResult:
    """Return the accepted tokens of a sequence's positions: up to the first that is not the drafted one."""
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
