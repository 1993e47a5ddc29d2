"""Deny and allow lists."""

import random

from gateway.safety.findings import Severity
from gateway.safety.rules.lexicon import Lexicon, fold_case
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import default_rules


def found(text: str, *deny: str) -> list[str]:
    findings = RuleSet((), Lexicon(deny)).scan(text)
    assert {(each.rule, each.severity) for each in findings} <= {("deny.list", Severity.HIGH)}
    return [text[each.start : each.end] for each in findings]


def test_words_match_whole_and_in_any_case() -> None:
    words = ("cat", "Straße", "ΟΔΟΣ", "blue  whale")
    text = "A CAT, concatenate cat_x CATS; STRAßE οδος"
    assert found(text, *words) == ["CAT", "STRAßE", "οδος"]


def test_scripts_without_spaces_have_no_word_boundary() -> None:
    assert found("这是机密文件。", "机密") == ["机密"]


def test_a_longer_entry_that_fails_does_not_hide_a_shorter_one() -> None:
    assert found("a cat housekeeping", "cat house", "cat") == ["cat"]


def test_offsets_hold_where_lower_case_is_longer() -> None:
    assert found("İİİ cat", "cat") == ["cat"]
    assert len(fold_case("İΣ")) == 2


def test_an_allowed_phrase_takes_back_what_lies_inside() -> None:
    allow = ("help@acme.example", "Blue Falcon Street")
    rules = RuleSet(default_rules(), Lexicon(("falcon",), allow))
    text = "Mail help@acme.example or bob@acme.example in Blue Falcon Street"
    assert [text[each.start : each.end] for each in rules.scan(text)] == ["bob@acme.example"]


def test_allowed_phrases_inside_each_other() -> None:
    rules = RuleSet((), Lexicon(("b",), ("c", "d", "a b c d e")))
    assert rules.scan("a b c d e") == []


def test_one_of_tens_of_thousands_of_entries_is_found() -> None:
    rng = random.Random(1)
    entries = tuple("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(40_000))
    text = "some ordinary words and " * 1000 + entries[77]
    (finding,) = Lexicon(entries).denied(text)
    assert (finding.start, finding.end) == (len(text) - 9, len(text))


def test_many_findings_under_many_allowed_phrases() -> None:
    rules = RuleSet((), Lexicon(("a", "b c"), ("a b", "b a")))
    assert {each.rule for each in rules.scan("a b " * 5000 + "b c")} <= {
        "deny.list",
        "limit.repetition",
    }
