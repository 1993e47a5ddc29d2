"""Long audio in chunks that overlap, and the tokens of their texts joined, as transformers' pipeline does both.

A chunk is as long as the model hears at once; a sixth of it on each side is heard by its neighbour too. What two
neighbours say in the overlap is found by sliding one's tokens along the other's: where most of them agree, half of the
overlap is taken from each.
"""

from collections.abc import Iterator, Sequence
from operator import eq
from typing import Final

from gateway.audio.wav import BYTES_A_SECOND, SAMPLE_BYTES

SHARED: Final = 6
"""The part of a chunk, 1 in so many, that its neighbour hears too, on each side."""
_LONGER: Final = 10_000.0
"""What prefers a long overlap to a short one that agrees as well."""


def chunks_of(pcm: bytes, chunk_s: float) -> Iterator[bytes]:
    """The chunks of the samples ``pcm``, in order: at least one; only the last may be shorter than ``chunk_s``."""
    size = int(chunk_s * BYTES_A_SECOND) // SAMPLE_BYTES * SAMPLE_BYTES
    step = size - 2 * (size // SAMPLE_BYTES // SHARED) * SAMPLE_BYTES
    for start in range(0, max(1, len(pcm)), step):
        yield pcm[start : start + size]
        if start + size >= len(pcm):
            return


def overlap(left: Sequence[int], right: Sequence[int]) -> tuple[int, int]:
    """Where the text goes over from ``left`` to ``right``: it is ``left[:a] + right[b:]``.

    Without two tokens that agree it is all of both.
    """
    best, found = 0.0, (len(left), 0)
    for shift in range(1, len(left) + len(right)):
        left_from, left_to = (
            max(0, len(left) - shift),
            min(len(left), len(left) + len(right) - shift),
        )
        right_from, right_to = max(0, shift - len(left)), min(len(right), shift)
        agreed = sum(map(eq, left[left_from:left_to], right[right_from:right_to]))
        score = agreed / shift + shift / _LONGER
        if agreed > 1 and score > best:
            best, found = score, ((left_from + left_to) // 2, (right_from + right_to) // 2)
    return found


class JoinedTexts:
    """The tokens of chunks, joined as they come in order."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """The chunk that is next has these; returns the tokens of the text that are certain now."""
        until, start = overlap(self._left, token_ids)
        certain, self._left = self._left[:until], list(token_ids[start:])
        return certain

    def end(self) -> list[int]:
        """There are no more chunks; returns the rest."""
        rest, self._left = self._left, []
        return rest
