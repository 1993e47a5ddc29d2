"""Parts of long texts."""

import re

from hypothesis import given
from hypothesis import strategies as st

from jobs.core.split import split


def ends_of(text: str) -> list[int]:
    """Words and single other characters are tokens."""
    return [match.end() for match in re.finditer(r"\s?\w+|\W", text)]


def parts(text: str, size: int, overlap: int) -> list[str]:
    return [text[begin:end] for begin, end in split(text, ends_of(text), size, overlap)]


def test_a_short_text_is_one_part() -> None:
    assert parts("one two", 5, 2) == ["one two"]
    assert parts("", 5, 2) == []


def test_parts_overlap_by_tokens() -> None:
    assert parts("a b c d e f g", 3, 1) == ["a b c", " c d e", " e f g"]


def test_a_part_ends_where_a_sentence_does() -> None:
    text = "one two three four five six. seven eight nine ten"
    assert parts(text, 8, 0) == ["one two three four five six.", " seven eight nine ten"]


@given(
    st.text("ab .\n", max_size=200),
    st.integers(1, 20).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))),
)
def test_nothing_is_lost_and_no_part_is_too_long(text: str, sizes: tuple[int, int]) -> None:
    size, overlap = sizes
    ends = ends_of(text)
    position = before = 0
    for begin, end in split(text, ends, size, overlap):
        tokens = [at for at in ends if begin < at <= end]
        shared = [at for at in ends if begin < at <= position]
        assert before <= begin <= position < end
        assert 0 < len(tokens) <= size
        assert len(shared) <= overlap
        position, before = end, begin
    assert position == len(text)
