"""The answer in pieces becomes what the whole answer would."""

import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.safety.findings import Action, ActionTable, Choice, Placeholders, Severity
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


FRAMED = (f"Write to {text} or call. {text}." for text in (*SECRETS, *PLAIN))


@pytest.mark.parametrize("text", [*SECRETS, *PLAIN, *FRAMED])
def test_every_split_in_two_gives_what_the_whole_gives(text: str) -> None:
    expected = whole(small_rules(), text)
    for at in range(len(text) + 1):
        check_pieces(small_rules(), [text[:at], text[at:]], expected)


@pytest.mark.parametrize(
    ("is_default", "texts", "edited"),
    [(False, 40, 20), (True, 20, 2), pytest.param(True, 2000, 200, marks=pytest.mark.long)],
    ids=["small rules", "default rules", "default rules, many texts"],
)
def test_random_splits_give_what_the_whole_gives(is_default: bool, texts: int, edited: int) -> None:
    rng = random.Random(5)
    rules, samples = (rules_of(*default()), SAMPLES) if is_default else (small_rules(), SECRETS)
    for _ in range(texts):
        text = random_text(rng, samples)
        expected = whole(rules, text)
        edited -= bool(expected.edits)
        for _ in range(20):
            check_pieces(rules, random_pieces(text, rng), expected)
    assert edited < 0, "most texts have something to edit"


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


NO_WORDS = [r for r in RULES if r.id not in {"pii.email", "secret.hex", "secret.assignment"}]
WAITS = {
    "words wait for their end": (small_rules(), ["", "The ", "quick ", "brown ", "fox!", " "]),
    "without rules that words begin nothing waits": (
        rules_of([rule.watched for rule in NO_WORDS], SmallScanner()),
        ["The", " quick", " brown", " fo", "x!", " "],
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_text_waits_only_while_it_may_match(name: str) -> None:
    rules, shown = WAITS[name]
    redactor = Redactor(rules, Placeholders())
    assert [redactor.push(word) for word in ("The", " quick", " brown", " fox", "!", " ")] == shown


def test_a_block_ends_the_answer_before_it() -> None:
    table = ActionTable({"secret.*": Choice(Action.BLOCK), "pii.*": Choice(Action.REDACT)})
    text = "mail a@b.co, key AKIAIOSFODNN7EXAMPLE and more"
    shown, redactor = stream(text, table=table)
    assert shown == "mail <EMAIL_1>, key "
    early = Redactor(replace(small_rules(), table=table), Placeholders())
    early.push("AKIAIOSFODNN7EXAMPLE")
    assert not early.stopped
    early.push(" ")
    assert early.stopped, "as soon as the match is known"
    assert redactor.stopped == ("secret.aws_access_key",)
    assert redactor.push("more") == ""
    assert len(redactor.hidden) == 2


def test_rules_that_only_flag_change_nothing() -> None:
    table = ActionTable(severities={Severity.CRITICAL: Choice(Action.BLOCK)})
    assert stream("a@b.co", table=table)[0] == "a@b.co"


CUT = {
    "the key is AKIAIOSFODNN7EXAMPL": "the key is AKIA",
    "mail a@b.co": "mail <EMAIL_1>",
    "mail a@b.co and the informatio": "mail <EMAIL_1> and the info",
}


@pytest.mark.parametrize("text", CUT)
def test_a_cut_answer_shows_little_of_what_may_be_a_secret(text: str) -> None:
    assert stream(text, truncated=True)[0] == CUT[text]
    assert stream(text)[0] == text.replace("a@b.co", "<EMAIL_1>")


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
    text, redactor, most, shown = "1 2 3 4 " * 1000, Redactor(small_rules(), Placeholders()), 0, ""
    expected = whole(small_rules(), text).text
    for at in range(0, len(text), 4):
        shown += redactor.push(text[at : at + 4])
        most = max(most, redactor.pending_chars)
    assert most < 1000
    decided = redactor.decided
    assert decided > 0
    assert expected.startswith(shown + redactor.finish(truncated=True))
    assert redactor.shown_to >= decided
    assert stream(text, 4)[0] == expected
