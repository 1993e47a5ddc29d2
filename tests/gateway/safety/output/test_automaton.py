"""The automaton follows every match of a pattern, character by character."""

import re
import warnings

import hypothesis.strategies as st
import pytest
import re2
from hypothesis import given

from gateway.safety.output.automaton import (
    Automaton,
    StreamWatch,
    WordList,
)
from gateway.safety.patterns import PatternError
from gateway.safety.rules.spec import RuleSpec, default_rules
from tests.gateway.safety.output.kit import rule_spec

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
        Automaton([rule_spec(pattern)])


@given(
    st.sampled_from(PATTERNS),
    st.text(alphabet="abcdexkKsſ1.-_A B\nyé", max_size=30),
)
def test_a_match_is_never_missed(pattern: str, text: str) -> None:
    automaton = Automaton([rule_spec(pattern)])
    for engine in (re2.compile(pattern), python_pattern(pattern)):
        for match in engine.finditer(text) if engine else ():
            start, end = match.span()
            watch = StreamWatch(automaton)
            for char in text[: end - 1]:
                watch.feed(char)
                assert watch.free_to() <= max(start, 0) or watch.end <= start
            watch.feed(text[end - 1])
            assert watch.claims_before(start + 1)


def python_pattern(pattern: str) -> "re.Pattern[str] | None":
    try:
        with warnings.catch_warnings(action="error"):
            return re.compile(pattern.replace(r"\z", r"\Z"))
    except (re.error, FutureWarning):
        return None


HEADED = rule_spec(r"(?i)\bkey[:=] ?[a-z0-9]{4,9}", 20, 20, head=r"(?i)\bkey[:=] ?")
(KEY,) = (spec for spec in default_rules() if spec.id == "secret.private_key")
HERONS = WordList(["Blue Heron", "ΣΟΦΟΣ", "heron", ""])
ALL = -1
"""Stands for the end of what was fed: nothing waits."""


FOLLOWED: dict[str, tuple[RuleSpec | WordList, list[tuple[str, int]]]] = {
    "repeat too long to write out": (
        rule_spec(r"<[a-z ]{3,1000}>", 1002), [("so <" + "a " * 600, 3), (">", ALL)]
    ),
    "lazy": (rule_spec(r"<b>[^<]{0,9}?</b>", 16), [("a <b>b</b", 2), ("> c", ALL)]),
    **{
        f"end decided behind it: {pattern}": (rule_spec(pattern, 2), [("x AB", 2), (" ", ALL)])
        for pattern in (r"\bAB\b", r"AB\B", "AB$", r"AB\z", r"AB(?:\b|\z)")
    },
    "end that nothing decides": (rule_spec("AB", 2), [("x AB", ALL)]),
    "private key": (
        KEY,
        [
            ("so -----BEGIN RSA PRIVATE KEY-----\nMII+/=\u2028" + "ab" * 9, 3),
            ("-----END RSA PRIVATE KEY-----\n" + "x" * 8, ALL),
        ],
    ),
    "invisible characters": (
        rule_spec("abcd{0,7}", 10, after=3), [("abc" + "d\u200b" * 9, 0), ("d", ALL)]
    ),
    "words": (HERONS, [("a BLUE\u200b hero", 2), ("n, σοφος", -6)]),
    "word inside another": (HERONS, [("a cher", ALL)]),
    "head": (HEADED, [("a KEY", ALL), ("= ", ALL), ("x1", 7), ("b2c", 7), (" ", ALL)]),
    "no head": (HEADED, [("monkey= x1b2c key x1b2c", ALL)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_text_waits_while_it_may_match(name: str) -> None:
    followed, steps = FOLLOWED[name]
    words = followed if isinstance(followed, WordList) else None
    watch = StreamWatch(Automaton([] if isinstance(followed, WordList) else [followed], words))
    for text, free in steps:
        watch.feed(text)
        assert watch.free_to() == (free if free >= 0 else watch.end + 1 + free), text


CLAIMED = {
    "(?i)µx": ("яμx", "яΜX", "яµx"),
    "(a(?i)b)[^b]": ("aBB",),
    "AB": ("x AB",),
    r"<b>[^<]{0,9}?</b>": ("a <b>b</b>",),
}


@pytest.mark.parametrize("pattern", CLAIMED)
def test_complete_match_is_claimed(pattern: str) -> None:
    for text in CLAIMED[pattern]:
        watch = StreamWatch(Automaton([rule_spec(pattern)]))
        watch.feed(text)
        assert watch.claims_before(len(text))
    watch = StreamWatch(Automaton([HEADED]))
    watch.feed("monkey= x1b2c key x1b2c")
    assert not watch.claims_before(watch.end), "without its head nothing matches"
