"""One step as arrays: chunks packed one after the other, without padding.

Chunks of few tokens (decoding, verification of drafts) come first, prompts after them, because attention computes the
two differently. Everything is computed on the host, before the first layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model_workers.engine.paged_model import SequenceChunk

SHORT_TOKENS: Final = 16
"""Maximum length of chunks that decode attention computes token by token."""

Ints = NDArray[np.int64]


@dataclass(slots=True)
class PackedChunk:
    """A chunk in packed order: tokens `first` to `first + count - 1`, from position `start`.

    Attributes:
        blocks: Block numbers up to the chunk's end.
    """

    first: int
    count: int
    start: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The packed arrays.

    Attributes:
        tokens, positions: One per packed token.
        blocks, offsets: Where each token's key and value are written.
        logits_indices: Packed indices whose logits are wanted, in the order of the given chunks.
        short: Chunks of few tokens, which fill the first `short_tokens` places.
        long: The other chunks.
    """

    tokens: Ints
    positions: Ints
    blocks: Ints
    offsets: Ints
    logits_indices: Ints
    short: tuple[PackedChunk, ...]
    long: tuple[PackedChunk, ...]
    short_tokens: int


def pack(chunks: Sequence[SequenceChunk], block_tokens: int) -> PackedStep:
    """Pack chunks, at least one."""
    order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].tokens) > SHORT_TOKENS)
    spans: dict[int, PackedChunk] = {}
    first = 0
    for index in order:
        chunk = chunks[index]
        count = len(chunk.tokens)
        blocks = chunk.blocks[: -(-(chunk.start + count) // block_tokens)]
        spans[index] = PackedChunk(first, count, chunk.start, blocks)
        first += count
    packed = [spans[index] for index in order]
    positions = _ints(chain.from_iterable(range(s.start, s.start + s.count) for s in packed))
    ends = ((spans[i].first + spans[i].count, chunk.logits) for i, chunk in enumerate(chunks))
    short = tuple(span for span in packed if span.count <= SHORT_TOKENS)
    return PackedStep(
        tokens=_ints(chain.from_iterable(chunks[index].tokens for index in order)),
        positions=positions,
        blocks=_blocks(packed, block_tokens),
        offsets=positions % block_tokens,
        logits_indices=_ints(chain.from_iterable(range(end - logits, end) for end, logits in ends)),
        short=short,
        long=tuple(packed[len(short) :]),
        short_tokens=sum(span.count for span in short),
    )


def _ints(values: "chain[int] | list[int]") -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _blocks(spans: Sequence[PackedChunk], block_tokens: int) -> Ints:
    return _ints(
        [s.blocks[p // block_tokens] for s in spans for p in range(s.start, s.start + s.count)]
    )
