"""Rules of the inspection as the stream follows them, and lists of words."""

from dataclasses import dataclass, replace

import pytest

from gateway.safety.output.automaton import Automaton, StreamWatch
from gateway.safety.output.watched import UNBOUNDED, WatchedRule, WordList, watched_rules


@dataclass(frozen=True)
class Form:
    pattern: str
    head: str = ""


@dataclass(frozen=True)
class Spec:
    id: str
    forms: tuple[Form, ...]
    max_length: int
    context_chars: int = 48


def test_what_a_rule_looks_at_is_kept() -> None:
    rule, key = watched_rules(
        [
            Spec("pii.a", (Form("a{3}"), Form("b")), 3),
            Spec("secret.private_key", (Form("-----BEGIN PRIVATE KEY-----"),), 16384),
        ],
        look_behind=32,
        look_ahead=8,
    )
    expected = WatchedRule("pii.a", ("a{3}", "b"), 3, context_before=80, context_after=8)
    assert rule == replace(expected, heads=("", ""))
    watch = StreamWatch(Automaton([key]))
    watch.feed("so -----BEGIN RSA PRIVATE KEY-----\nMII+/=\nab\n")
    assert watch.free_to == 3
    watch.feed("-----END RSA PRIVATE KEY-----\n" + "x" * 8)
    assert watch.free_to == watch.end


def test_a_finding_that_may_grow_is_not_cut() -> None:
    watch = StreamWatch(Automaton([WatchedRule("r", ("abc",), 10, grows=True)]))
    watch.feed("abc" + "d" * 9)
    assert watch.free_to == 0
    watch.feed("d")
    assert watch.free_to == watch.end


def test_a_match_inside_one_that_may_grow_does_not_shorten_it() -> None:
    rules = [WatchedRule("r", ("abc",), 30, grows=True), WatchedRule("s", ("1+",), 5)]
    watch = StreamWatch(Automaton(rules))
    watch.feed("abc-11-----1111")
    assert watch.free_to == 0


def test_invisible_characters_do_not_count() -> None:
    rule = WatchedRule("r", ("abc",), 10, context_after=3, grows=True)
    watch = StreamWatch(Automaton([rule]))
    watch.feed("abc" + "d\u200b" * 12)
    assert watch.free_to == 0
    watch.feed("d")
    assert watch.free_to == watch.end


def test_growth_without_bound_waits_for_the_end() -> None:
    assert WatchedRule("r", ("abc",), None, grows=True).growth == UNBOUNDED


@pytest.mark.parametrize(("whole", "free"), [(True, 5), (False, 1)])
def test_words_inside_longer_ones_count_where_the_list_says_so(whole: bool, free: int) -> None:
    watch = StreamWatch(Automaton([], WordList(["heron", "ΣΟΦΟΣ"], whole)))
    watch.feed("ahero")
    assert watch.free_to == free


def test_words_are_found_in_any_case() -> None:
    watch = StreamWatch(Automaton([], WordList(["Blue Heron", "ΣΟΦΟΣ", ""])))
    watch.feed("a BLUE\u200b hero")
    assert watch.free_to == 2
    watch.feed("n, σοφος")
    assert watch.claims_before(3)
    assert watch.free_to == watch.end - 5


HEADED = WatchedRule("r", (r"(?i)\bkey[:=] ?[a-z0-9]{4,9}",), 20, 20, heads=(r"(?i)\bkey[:=] ?",))


def test_a_head_holds_nothing_back() -> None:
    watch = StreamWatch(Automaton([HEADED]))
    watch.feed("a KEY")
    assert watch.free_to == 5
    watch.feed("= ")
    assert watch.free_to == 7
    watch.feed("x1")
    assert watch.free_to == 7
    watch.feed("b2c")
    assert watch.claims_before(8)
    watch.feed(" ")
    assert watch.free_to == watch.end


def test_without_its_head_nothing_matches() -> None:
    watch = StreamWatch(Automaton([HEADED]))
    watch.feed("monkey= x1b2c key x1b2c")
    assert not watch.claims_before(watch.end)
    assert watch.free_to == watch.end


def test_a_head_before_the_beginning_counts() -> None:
    watch = StreamWatch(Automaton([HEADED]), at=7, before="a key: ")
    watch.feed("x1b")
    assert watch.free_to == 7
