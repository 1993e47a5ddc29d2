"""The answer in pieces becomes what the whole answer would."""

import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.safety.actions import Action, ActionTable, Choice, Placeholders
from gateway.safety.findings import Severity
from gateway.safety.output.automaton import Automaton, WordList
from gateway.safety.output.redactor import Redactor
from tests.gateway.safety.output.kit import (
    PLAIN,
    RULES,
    SECRETS,
    WORDS,
    SmallScanner,
    check_pieces,
    random_pieces,
    random_text,
    rules_of,
    small_rules,
    whole,
)
from tests.gateway.safety.output.real import SAMPLES, default
from tests.gateway.safety.output.splits import corpus, many_way, two_way
from tests.gateway.safety.rules.samples import FOUND

PARTS = st.one_of(
    st.sampled_from(SECRETS),
    st.sampled_from(PLAIN),
    st.text(alphabet="ab1 -.@AKI_+=\n\u200bé", max_size=12),
)
TEXTS = st.lists(PARTS, max_size=6).map("".join)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def stream(
    text: str, size: int = 3, truncated: bool = False, table: ActionTable | None = None
) -> tuple[str, Redactor]:
    rules = small_rules() if table is None else replace(small_rules(), table=table)
    redactor = Redactor(rules, Placeholders())
    shown = "".join(redactor.push(text[at : at + size]) for at in range(0, len(text), size))
    return shown + redactor.finish(truncated), redactor


@given(TEXTS, CUTS)
def test_any_split_gives_what_the_whole_gives(text: str, cuts: list[int]) -> None:
    rules, at = small_rules(), 0
    pieces: list[str] = []
    while at < len(text):
        step = cuts[len(pieces) % len(cuts)]
        pieces.append(text[at : at + step])
        at += step
    check_pieces(rules, pieces, whole(rules, text))


def test_every_split_in_two_of_what_each_rule_finds() -> None:
    assert two_way(small_rules(), corpus(seed=7, size=4)) > 1000


def test_random_splits() -> None:
    counts = many_way(small_rules(), splits=800, seed=5)
    assert counts["texts_with_edits"] > 20


def test_random_splits_under_the_default_rules() -> None:
    counts = many_way(rules_of(*default()), splits=400, seed=5, samples=SAMPLES)
    assert counts["texts_with_edits"] > 2


def test_nothing_changes_when_the_states_are_forgotten() -> None:
    automaton = Automaton([rule.watched for rule in RULES], WordList(WORDS), states_max=20)
    rules = replace(small_rules(), automaton=automaton)
    rng = random.Random(3)
    for _ in range(15):
        text = random_text(rng)
        check_pieces(rules, random_pieces(text, rng), whole(rules, text))


@pytest.mark.parametrize("text", [text for text in SECRETS if "kg" not in text])
def test_every_secret_is_found(text: str) -> None:
    shown, _ = stream(text)
    assert "<" in shown


def test_ordinary_words_wait_for_their_end_alone() -> None:
    redactor = Redactor(small_rules(), Placeholders())
    shown = [redactor.push(word) for word in ("The", " quick", " brown", " fox", "!", " ")]
    assert shown == ["", "The ", "quick ", "brown ", "fox!", " "]


def test_without_rules_that_words_could_begin_nothing_waits() -> None:
    plain = [
        r.watched for r in RULES if r.id not in {"pii.email", "secret.hex", "secret.assignment"}
    ]
    redactor = Redactor(rules_of(plain, SmallScanner()), Placeholders())
    assert [redactor.push(word) for word in ("The", " quick", " brown")] == [
        "The",
        " quick",
        " brown",
    ]


def test_a_block_ends_the_answer_before_it() -> None:
    table = ActionTable({"secret.*": Choice(Action.BLOCK), "pii.*": Choice(Action.REDACT)})
    text = "mail a@b.co, key AKIAIOSFODNN7EXAMPLE and more"
    shown, redactor = stream(text, table=table)
    assert shown == "mail <EMAIL_1>, key "
    assert redactor.stopped == ("secret.aws_access_key",)
    assert redactor.push("more") == ""
    assert len(redactor.hidden) == 2


def test_a_stop_is_known_as_soon_as_the_match_is() -> None:
    table = ActionTable({"secret.aws_access_key": Choice(Action.BLOCK)})
    redactor = Redactor(replace(small_rules(), table=table), Placeholders())
    redactor.push("AKIAIOSFODNN7EXAMPLE")
    assert not redactor.stopped
    redactor.push(" ")
    assert redactor.stopped


def test_rules_that_only_flag_change_nothing() -> None:
    shown, _ = stream(
        "a@b.co", table=ActionTable(severities={Severity.CRITICAL: Choice(Action.BLOCK)})
    )
    assert shown == "a@b.co"


def test_a_cut_answer_shows_little_of_what_may_be_a_secret() -> None:
    shown, _ = stream("the key is AKIAIOSFODNN7EXAMPL", truncated=True)
    assert shown == "the key is AKIA"
    shown, _ = stream("the key is AKIAIOSFODNN7EXAMPL")
    assert shown == "the key is AKIAIOSFODNN7EXAMPL"


def test_a_cut_answer_still_loses_what_is_complete() -> None:
    shown, _ = stream("mail a@b.co", truncated=True)
    assert shown == "mail <EMAIL_1>"
    shown, _ = stream("mail a@b.co and the informatio", truncated=True)
    assert shown == "mail <EMAIL_1> and the info"


def test_a_key_without_an_end_is_taken_out_to_the_end() -> None:
    shown, redactor = stream("so:\n-----BEGIN PRIVATE KEY-----\n" + "abcd efgh\n" * 2000)
    assert shown == "so:\n<PRIVATE_KEY_1>"
    assert redactor.hidden[0][1] == redactor.decided


def test_context_counts_what_can_be_seen() -> None:
    hidden = "\u200b" * 3000
    for text in (
        f"passport {hidden}C12345678 x",
        f"12345-AB {hidden}kg",
        f"sess_abcd{hidden}" + "x1" * 10 + " y",
    ):
        check_pieces(small_rules(), list(text), whole(small_rules(), text))


def test_what_overlaps_a_long_match_is_found_behind_it() -> None:
    """The name of an address begins inside the last line of a key."""
    text = f"{FOUND['secret.private_key']}'2341jörg@exämple.\u200bco.uk and"
    check_pieces(rules_of(*default()), list(text), whole(rules_of(*default()), text))


def test_long_chains_of_matches_are_cut() -> None:
    text = "1 2 3 4 " * 2000
    redactor, most = Redactor(small_rules(), Placeholders()), 0
    shown = ""
    for at in range(0, len(text), 4):
        shown += redactor.push(text[at : at + 4])
        most = max(most, redactor.pending_chars)
    assert shown + redactor.finish() == whole(small_rules(), text).text
    assert most < 1000


def test_a_cut_answer_inside_a_chain_shows_what_is_decided() -> None:
    text = "1 2 3 4 " * 400
    redactor = Redactor(small_rules(), Placeholders())
    shown = "".join(redactor.push(text[at : at + 4]) for at in range(0, len(text), 4))
    decided = redactor.decided
    assert decided > 0
    shown += redactor.finish(truncated=True)
    assert whole(small_rules(), text).text.startswith(shown)
    assert redactor.shown_to >= decided
