"""Deny and allow lists."""

import random

import pytest

from gateway.safety.findings import Finding, Severity
from gateway.safety.rules.lexicon import Lexicon, ListKind, PhraseList, fold_case
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import RuleError, default_rules


def found(text: str, *lists: PhraseList) -> list[tuple[str, str]]:
    return [
        (each.rule, text[each.start : each.end]) for each in RuleSet((), phrases=lists).scan(text)
    ]


def test_words_match_whole_and_in_any_case() -> None:
    words = PhraseList("animals", ("cat", "Straße", "ΟΔΟΣ", "blue  whale"))
    assert found("A CAT, concatenate cat_x CATS; STRAßE οδος", words) == [
        ("deny.animals", "CAT"),
        ("deny.animals", "STRAßE"),
        ("deny.animals", "οδος"),
    ]


def test_scripts_without_spaces_have_no_word_boundary() -> None:
    assert found("这是机密文件。", PhraseList("a", ("机密",))) == [("deny.a", "机密")]


def test_a_longer_entry_that_fails_does_not_hide_a_shorter_one() -> None:
    assert found("a cat housekeeping", PhraseList("a", ("cat house", "cat"))) == [("deny.a", "cat")]


def test_offsets_hold_where_lower_case_is_longer() -> None:
    assert found("İİİ cat", PhraseList("a", ("cat",))) == [("deny.a", "cat")]
    assert len(fold_case("İΣ")) == 2


def test_an_allowed_phrase_takes_back_what_lies_inside() -> None:
    allow = PhraseList("own", ("help@acme.example", "Blue Falcon Street"), ListKind.ALLOW)
    rules = RuleSet(default_rules(), phrases=[allow, PhraseList("a", ("falcon",))])
    text = "Mail help@acme.example or bob@acme.example in Blue Falcon Street"
    assert [text[each.start : each.end] for each in rules.scan(text)] == ["bob@acme.example"]


def test_severity_of_a_list() -> None:
    rules = RuleSet((), phrases=[PhraseList("a", ("x1",), severity=Severity.LOW)])
    assert rules.scan("x1") == [Finding("deny.a", 0, 2, Severity.LOW)]


@pytest.mark.parametrize("entry", ["", "  ", "x" * 257])
def test_entries_that_cannot_be_used_are_refused(entry: str) -> None:
    with pytest.raises(RuleError, match=r"deny\.a"):
        Lexicon([PhraseList("a", (entry,))])


def test_tens_of_thousands_of_entries_cost_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    entries = tuple("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(40_000))
    lexicon = Lexicon([PhraseList("a", entries)])
    automaton, passes = lexicon._automaton, []

    class Counting:
        def find_matches_as_indexes(self, text: str, overlapping: bool) -> object:
            passes.append(len(text))
            return automaton.find_matches_as_indexes(text, overlapping=overlapping)

    monkeypatch.setattr(lexicon, "_automaton", Counting())
    text = "some ordinary words and " * 1000 + entries[77]
    assert [span for _, span in lexicon.matches(text)] == [(len(text) - 9, len(text))]
    assert passes == [len(text)]


def test_many_findings_under_many_allowed_phrases() -> None:
    allow = PhraseList("own", ("a b", "b a"), ListKind.ALLOW)
    rules = RuleSet((), phrases=[allow, PhraseList("a", ("a", "b c"))])
    assert {each.rule for each in rules.scan("a b " * 5000 + "b c")} <= {
        "deny.a",
        "limit.repetition",
    }
