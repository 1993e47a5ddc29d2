"""Chunks of long audio, and their texts joined, beside what transformers' pipeline makes of both."""

import random
from collections.abc import Sequence

import pytest

from gateway.models.speech import BYTES_A_SECOND, JoinedTexts, chunks_of, overlap


@pytest.mark.parametrize("chunk_s", [1.0, 2.0, 30.0])
def test_chunks_cover_the_audio_and_share_a_third(chunk_s: float) -> None:
    draw, size = random.Random(2), int(chunk_s * BYTES_A_SECOND)
    for _ in range(30):
        pcm = draw.randbytes(2 * draw.randrange(1, 3 * size))
        chunks = list(chunks_of(pcm, chunk_s))
        assert all(len(chunk) == size for chunk in chunks[:-1])
        assert 0 < len(chunks[-1]) <= size
        joined, shared = bytearray(chunks[0]), size - 2 * (size // 2 // 6) * 2
        shared = size - shared
        for chunk in chunks[1:]:
            assert len(chunk) > shared, "a chunk has something of its own"
            assert bytes(joined[-shared:]) == chunk[:shared]
            joined += chunk[shared:]
        assert bytes(joined) == pcm


def test_audio_as_long_as_a_chunk_is_one() -> None:
    assert [len(chunk) for chunk in chunks_of(bytes(BYTES_A_SECOND), 1.0)] == [BYTES_A_SECOND]


def join(texts: Sequence[Sequence[int]]) -> list[int]:
    """As they come."""
    joined, found = JoinedTexts(), []
    for text in texts:
        found += joined.add(text)
    return found + joined.end()


def spoken(draw: random.Random, words: int) -> list[list[int]]:
    """What chunks that overlap say of a text, each with a few words heard otherwise."""
    text = [draw.randrange(words) for _ in range(draw.randrange(200))]
    start, texts = 0, []
    while start < len(text) or not texts:
        said = text[start : start + draw.randrange(1, 60)]
        texts.append([one if draw.random() > 0.1 else draw.randrange(words) for one in said])
        start += max(1, len(said) - draw.randrange(20))
    return texts


@pytest.mark.parametrize("words", [3, 1000])
def test_texts_are_joined_as_transformers_joins_them(words: int) -> None:
    from transformers.models.whisper.tokenization_whisper import _find_longest_common_sequence

    draw = random.Random(words)
    for _ in range(25):
        texts = spoken(draw, words)
        assert join(texts) == _find_longest_common_sequence(texts)


def test_texts_that_overlap_are_the_text() -> None:
    draw = random.Random(4)
    for _ in range(200):
        text = draw.sample(range(1000), 80)
        shared = draw.randrange(2, 20)
        assert join([text[: 40 + shared], text[40:]]) == text


def test_texts_that_share_nothing_are_put_one_after_the_other() -> None:
    assert join([[1, 2, 3], [4, 5], [], [6]]) == [1, 2, 3, 4, 5, 6]
    assert overlap([], [1]) == (0, 0)
    assert join([]) == []
