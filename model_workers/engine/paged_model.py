"""The interface between scheduling and tensors: the chunks of a step, and the model that computes them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class SequenceChunk:
    """Consecutive tokens of one sequence.

    Like all that is made for each sequence in each step it is not frozen, which would take 3 to 5 times as long to make.

    Attributes:
        tokens: at least one. Those below 0 stand for tokens that only the device knows; see `PagedModel.feed`.
        start: position of the first of them in the sequence; all positions before it are in the cache.
        blocks: the sequence's block table: block ``i`` holds positions ``i * block_tokens`` to
            ``(i + 1) * block_tokens - 1``. Long enough for ``start + len(tokens)`` positions, may be longer.
        logits: for how many of the last tokens logits are wanted: 0 inside a prompt, 1 at its end and in decoding, more
            where drafted tokens are verified.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int


class PagedModel(Protocol):
    """A model with a paged KV cache. Not thread-safe.

    Attributes:
        block_tokens: tokens of a block.
        num_blocks: blocks of the cache; their numbers are 0 to ``num_blocks - 1``.
        context_tokens: longest sequence.
        vocab_size: width of the logits.
    """

    block_tokens: int
    num_blocks: int
    context_tokens: int
    vocab_size: int

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Computes all chunks packed, without padding, and writes their keys and values into the cache.

        Returns:
            float32 logits, shape (sum of ``chunk.logits``, vocab_size), in the order of the chunks, on the model's
            device. Valid until the next call.
        """

    def feed(self, drawn: Tensor) -> None:
        """Keeps tokens that were drawn, on the model's device: in the next step -1 stands for the first, -2 for the
        second of them, and so on. So the host need not have them to begin that step."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to), in all layers: copy on write."""

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zeroes whole blocks in all layers: what a sequence with broken numbers left (a masked NaN is still NaN)."""


log = logging.getLogger(__name__)

NO_PRIMITIVE: Final = "could not create a primitive"
"""What oneDNN says when it gets no memory."""
SPLIT_TOKENS_MIN: Final = 16
"""A chunk that memory does not suffice for is computed in parts of at least so many tokens."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a chunk could not be computed.

    Attributes:
        message: one sentence.
        of_sequence: the sequence is at fault: others were computed in the same step. Else it may be the worker.
        field: the path of the field of the public request that is to blame; empty: the model is.
    """

    message: str
    of_sequence: bool = False
    field: str = ""


class FaultIsolator:
    """Runs a paged model. A step that raises is computed again in halves, until only the chunks that break it fail."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model

    def forward(self, chunks: Sequence[SequenceChunk]) -> tuple[Tensor, dict[int, Fault]]:
        """See `PagedModel.forward`.

        Returns:
            Logits of the chunks that could be computed, in their order; and by place those that could not.

        Raises:
            Exception: the device fails at everything.
        """
        try:
            return self.model.forward(chunks), {}
        except Exception as error:
            # The other sequences must not fail with it. Computing a chunk twice writes the same values again.
            log.exception("a step of %d chunks failed", len(chunks))
            logits, errors = self._isolate(chunks, error)
        others = len(errors) < len(chunks)
        return logits, {place: _fault(error, others) for place, error in errors.items()}

    def _isolate(
        self, chunks: Sequence[SequenceChunk], error: Exception
    ) -> tuple[Tensor, dict[int, Exception]]:
        # Raises when the device is lost.
        torch.cuda.empty_cache()
        if len(chunks) == 1:
            smaller = _halves(chunks[0]) if _is_out_of_memory(error) else None
            return self._in_turn(*smaller) if smaller else (self._no_logits(), {0: error})
        middle = len(chunks) // 2
        first, broken = self._retry(chunks[:middle])
        first = first.clone()  # valid until the next call only
        second, more = self._retry(chunks[middle:])
        broken |= {middle + place: reason for place, reason in more.items()}
        parts = [part for part in (first, second) if len(part)]
        return torch.cat(parts) if parts else first, broken

    def _in_turn(
        self, first: SequenceChunk, rest: SequenceChunk
    ) -> tuple[Tensor, dict[int, Exception]]:
        """Computes one chunk as two, which needs less memory."""
        _, broken = self._retry([first])
        return (self._no_logits(), broken) if broken else self._retry([rest])

    def _retry(self, chunks: Sequence[SequenceChunk]) -> tuple[Tensor, dict[int, Exception]]:
        try:
            return self.model.forward(chunks), {}
        except Exception as error:  # logged by the first attempt
            return self._isolate(chunks, error)

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self.model.vocab_size)


def _halves(chunk: SequenceChunk) -> tuple[SequenceChunk, SequenceChunk] | None:
    middle = min(len(chunk.tokens) // 2, len(chunk.tokens) - chunk.logits)
    if middle < SPLIT_TOKENS_MIN:
        return None
    rest = replace(chunk, tokens=chunk.tokens[middle:], start=chunk.start + middle)
    return replace(chunk, tokens=chunk.tokens[:middle], logits=0), rest


def _is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "memory" in str(error) or str(error) == NO_PRIMITIVE


def _fault(error: Exception, others_computed: bool) -> Fault:
    if _is_out_of_memory(error):
        return Fault(
            "the worker has not enough memory to compute this sequence: lower prefill_tokens, or cache_gb or memory_share"
        )
    return Fault(f"the model failed on this sequence: {type(error).__name__}", others_computed)
