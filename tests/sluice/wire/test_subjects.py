"""Subjects have the stable names, and no name can break out of its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.wire import subjects


def test_the_names_are_stable() -> None:
    assert subjects.frames("gw-1") == "sluice.frames.gw-1"
    assert subjects.task_to("b-1") == "sluice.batchers.b-1.task"
    assert subjects.control_to("b-1") == "sluice.batchers.b-1.control"
    assert subjects.absent("gw-1", "b-1") == "sluice.absent.gw-1.b-1"
    assert subjects.dead_letters("small", "bulk") == "sluice.dead_letters.small.bulk"


@given(st.text(max_size=70))
def test_a_token_never_holds_a_wildcard_a_dot_or_a_space(name: str) -> None:
    if subjects.is_token(name):
        assert not set(name) & set(".*> \t\r\n")
        assert 1 <= len(name) <= 64


@pytest.mark.parametrize("name", ["", "a.b", "a>", "*", "a b", "ä", "x" * 65])
def test_a_bad_token_is_our_mistake(name: str) -> None:
    with pytest.raises(AssertionError):
        subjects.frames(name)


@pytest.mark.parametrize(
    ("pattern", "subject", "whether"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a.*.c", True),
        ("a.>", "a.>", True),
        (">", "a", True),
        ("a.>", "a", False),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("a.*", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.b", "b.b", False),
    ],
)
def test_a_pattern_covers_what_it_matches_all_of(pattern: str, subject: str, whether: bool) -> None:
    assert subjects.covers(pattern, subject) is whether


@pytest.mark.parametrize("subject", ["a", "a.*.c", "a.>", ">", "*", "prompts.Été"])
def test_subjects_may_have_wildcards(subject: str) -> None:
    assert subjects.is_pattern(subject)


@pytest.mark.parametrize("subject", ["", "a.", ".a", "a..b", "a.>.b", "a>", "a*.b", "a b", "a\tb"])
def test_what_is_no_subject(subject: str) -> None:
    assert not subjects.is_pattern(subject)
