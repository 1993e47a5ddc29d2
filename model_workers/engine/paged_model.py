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

    Not frozen: one is made for each sequence and step.

    Attributes:
        tokens: At least one. Those below 0 stand for tokens that only the device knows; see `PagedModel.feed`.
        start: Position of the first token in the sequence; all positions before it are in the cache.
        blocks: The block table: block `i` holds positions `i * block_tokens` to `(i + 1) * block_tokens - 1`. It covers
            at least `start + len(tokens)` positions.
        logits: Number of last tokens whose logits are wanted: 0 inside a prompt, 1 at its end and in decoding, more if
            drafted tokens are verified or given tokens scored.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int


class PagedModel(Protocol):
    """A model with a paged KV cache. Not thread-safe.

    Attributes:
        block_tokens: Tokens per block.
        num_blocks: Number of blocks; they are numbered from 0.
        context_tokens: Maximum length of a sequence.
        vocab_size: Width of the logits.
    """

    block_tokens: int
    num_blocks: int
    context_tokens: int
    vocab_size: int

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Compute all chunks, packed without padding, and write their keys and values into the cache.

        Returns:
            float32 logits, shape (sum of `chunk.logits`, vocab_size), in the order of the chunks, on the model's
            device. They are valid until the next call.
        """

    def feed(self, drawn: Tensor) -> None:
        """Keep drawn tokens on the model's device, so that the host can begin the next step before it has them.

        In that step -1 stands for the first token, -2 for the second, and so on.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, as (from, to), in all layers (copy on write)."""

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks in all layers after a sequence with broken numbers: a masked NaN is still NaN."""


logger = logging.getLogger(__name__)

NO_PRIMITIVE: Final = "could not create a primitive"
"""Message of oneDNN when it gets no memory."""
SPLIT_TOKENS_MIN: Final = 16
"""Minimum tokens of the parts into which a chunk is split when memory is short."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a chunk could not be computed.

    Attributes:
        message: One sentence.
        of_sequence: Whether the sequence is at fault: others were computed in the same step. Else it may be the worker.
        field: Path of the invalid field of the public request; empty: none.
    """

    message: str
    of_sequence: bool = False
    field: str = ""


class FaultIsolator:
    """Runs a paged model; computes the chunks of a step that raises one by one, so that only faulty ones fail."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model

    def forward(self, chunks: Sequence[SequenceChunk]) -> tuple[Tensor, dict[int, Fault]]:
        """Compute chunks; see `PagedModel.forward`.

        Returns:
            Logits of the chunks that could be computed, in order; and the faults of the others by index.

        Raises:
            Exception: The device is lost. Chunks that fail are faults, even if all of them do.
        """
        try:
            return self.model.forward(chunks), {}
        except Exception:
            # The other sequences must not fail with it. Computing a chunk twice writes the same values again.
            logger.exception("a step of %d chunks failed", len(chunks))
        torch.cuda.empty_cache()  # raises when the device is lost
        logits: list[Tensor] = []
        errors: dict[int, Exception] = {}
        for place, chunk in enumerate(chunks):
            try:
                logits.append(self._alone(chunk))
            except Exception as error:  # logged by the first attempt
                errors[place] = error
        is_partial = len(errors) < len(chunks)
        faults = {place: _fault(error, is_partial) for place, error in errors.items()}
        parts = [part for part in logits if len(part)]
        return torch.cat(parts) if parts else torch.empty(0, self.model.vocab_size), faults

    def _alone(self, chunk: SequenceChunk) -> Tensor:
        """Compute one chunk; in halves, which need less memory, where it is short."""
        try:
            return self.model.forward([chunk]).clone()  # valid until the next call only
        except Exception as error:
            smaller = _halves(chunk) if _is_out_of_memory(error) else None
            if smaller is None:
                raise
        torch.cuda.empty_cache()
        self._alone(smaller[0])
        return self._alone(smaller[1])


def _halves(chunk: SequenceChunk) -> tuple[SequenceChunk, SequenceChunk] | None:
    middle = min(len(chunk.tokens) // 2, len(chunk.tokens) - chunk.logits)
    if middle < SPLIT_TOKENS_MIN:
        return None
    rest = replace(chunk, tokens=chunk.tokens[middle:], start=chunk.start + middle)
    return replace(chunk, tokens=chunk.tokens[:middle], logits=0), rest


def _is_out_of_memory(error: Exception) -> bool:
    is_typed = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_typed or "memory" in str(error) or str(error) == NO_PRIMITIVE


def _fault(error: Exception, others_computed: bool) -> Fault:
    if _is_out_of_memory(error):
        return Fault(
            "not enough memory to compute this sequence; lower prefill_tokens, cache_gb or memory_share"
        )
    return Fault(f"the model failed on this sequence: {type(error).__name__}", others_computed)
