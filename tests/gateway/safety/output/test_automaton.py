"""The automaton follows every match of a pattern, character by character."""

import re
import warnings

import hypothesis.strategies as st
import pytest
import re2
from hypothesis import given

from gateway.safety.output.automaton import Automaton, StreamWatch, WatchedRule
from gateway.safety.patterns import PatternError

PATTERNS = (
    r"\bab{1,3}c\b", r"a(?:b|cd)*e", r"(?i)k[s-u]+", r"[^a-c\s]{2}x", r"\Aab|ba\z", r"a.c", r"(?s)a.c",
    r"a??b+?c", r"x{2,}y", r"\d+[.]\d{1,3}", r"[A-Za-z]_[\w-]", r"(?:a\.b)+", r"\x41\x{42}", r"\pL1", r"a\Bb\b",
    r"(?P<n>a)(?<m>b)|c(?i:d)e", r"(?i)ſ?s", r"(?m)^a$", r"(a|ab)(c|bcd)", r"a[\s\S]*?b|c", r"a(?i)b(?-i:c)d|e",
    r"(a(?i)b)[^b]|(?:x|(?i)k)[^K]", r"(?:ab){0}c(?:d?e){2,}",
)  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a(?=b)", "invalid perl operator"),
        ("a*", "empty"),
        ("", "empty"),
        (r"\b", "empty"),
        ("a{600}" * 11, "written out"),
    ],
)
def test_what_cannot_be_followed_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        Automaton([WatchedRule("some.rule", (pattern,))])


@given(
    st.sampled_from(PATTERNS),
    st.text(alphabet="abcdexkKsſ1.-_A B\nyé", max_size=30),
)
def test_a_match_is_never_missed(pattern: str, text: str) -> None:
    automaton = Automaton([WatchedRule("r", (pattern,))])
    for engine in (re2.compile(pattern), python_pattern(pattern)):
        for match in engine.finditer(text) if engine else ():
            start, end = match.span()
            watch = StreamWatch(automaton)
            for char in text[: end - 1]:
                watch.feed(char)
                assert watch.free_to <= max(start, 0) or watch.end <= start
            watch.feed(text[end - 1])
            assert watch.claims_before(start + 1)


def python_pattern(pattern: str) -> "re.Pattern[str] | None":
    try:
        with warnings.catch_warnings(action="error"):
            return re.compile(pattern.replace(r"\z", r"\Z"))
    except (re.error, FutureWarning):
        return None


def test_a_letter_outside_ascii_has_all_its_cases() -> None:
    automaton = Automaton([WatchedRule("r", ("(?i)µx",))])
    for text in ("яμx", "яΜX", "яµx"):
        watch = StreamWatch(automaton)
        watch.feed(text)
        assert watch.claims_before(2)


def test_repeats_too_long_to_write_out_follow_more_not_less() -> None:
    automaton = Automaton([WatchedRule("r", (r"<[a-z ]{3,1000}>",), 1002)])
    watch = StreamWatch(automaton)
    watch.feed("so <" + "a " * 600)
    assert watch.free_to == 3
    watch.feed(">")
    assert watch.claims_before(4)
    assert watch.free_to == watch.end


def test_a_lazy_pattern_is_followed_as_a_greedy_one() -> None:
    watch = StreamWatch(Automaton([WatchedRule("r", (r"<b>[^<]{0,9}?</b>",), 16)]))
    watch.feed("a <b>b</b")
    assert watch.free_to == 2
    watch.feed("> c")
    assert watch.claims_before(3)
    assert watch.free_to == watch.end


@pytest.mark.parametrize("pattern", [r"\bAB\b", r"AB\B", "AB$", r"AB\z", r"AB(?:\b|\z)"])
def test_a_match_waits_for_what_decides_where_it_ends(pattern: str) -> None:
    watch = StreamWatch(Automaton([WatchedRule("r", (pattern,), 2)]))
    watch.feed("x AB")
    assert watch.free_to == 2
    watch.feed(" ")
    assert watch.free_to == watch.end


def test_a_match_that_nothing_behind_decides_does_not_wait() -> None:
    watch = StreamWatch(Automaton([WatchedRule("r", ("AB",), 2)]))
    watch.feed("x AB")
    assert watch.claims_before(3)
    assert watch.free_to == watch.end


def test_flags_hold_to_the_end_of_their_group() -> None:
    watch = StreamWatch(Automaton([WatchedRule("r", ("(a(?i)b)[^b]",), 3)]))
    watch.feed("aBB")
    assert watch.claims_before(1)
