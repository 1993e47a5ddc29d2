"""Stop strings, against a reference that sees the whole text."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from gateway.streaming.transcript import StopMatcher

TEXTS = st.text(alphabet="ab\n", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first; of two that end together the longer one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: end - len(found)], found
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=8))
def test_released_text_does_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    released = "".join(matcher.push(piece) for piece in pieces(text, cuts)) + matcher.flush()
    assert (released, matcher.matched) == reference(text, stops)


@given(TEXTS, STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = matcher.push(text)
    if matcher.matched is None:
        held = text[len(released) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert StopMatcher([]).push("any") == "any"


def test_nothing_is_released_after_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert matcher.push("three") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "END"
