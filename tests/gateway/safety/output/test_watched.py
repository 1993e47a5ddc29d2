"""Rules as the stream of an answer follows them, and lists of words."""

from dataclasses import replace

from gateway.safety.findings import Severity
from gateway.safety.output.automaton import (
    Automaton,
    StreamWatch,
    WatchedRule,
    WordList,
    watched_rules,
)
from gateway.safety.rules.spec import Form, RuleSpec, default_rules


def test_what_a_rule_looks_at_is_kept() -> None:
    rule, key = watched_rules(
        [
            RuleSpec("pii.a", (Form("a{3}"), Form("b")), Severity.LOW, 3),
            *(spec for spec in default_rules() if spec.id == "secret.private_key"),
        ]
    )
    expected = WatchedRule("pii.a", ("a{3}", "b"), 3, context_before=80, context_after=8)
    assert rule == replace(expected, heads=("", ""))
    watch = StreamWatch(Automaton([key]))
    watch.feed("so -----BEGIN RSA PRIVATE KEY-----\nMII+/=\u2028" + "ab" * 9)
    assert watch.free_to == 3
    watch.feed("-----END RSA PRIVATE KEY-----\n" + "x" * 8)
    assert watch.free_to == watch.end


def test_invisible_characters_do_not_count() -> None:
    rule = WatchedRule("r", ("abcd{0,7}",), 10, context_after=3)
    watch = StreamWatch(Automaton([rule]))
    watch.feed("abc" + "d\u200b" * 9)
    assert watch.free_to == 0
    watch.feed("d")
    assert watch.free_to == watch.end


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


def test_no_word_begins_inside_another() -> None:
    watch = StreamWatch(Automaton([], WordList(["heron"])))
    watch.feed("a cher")
    assert watch.free_to == watch.end
