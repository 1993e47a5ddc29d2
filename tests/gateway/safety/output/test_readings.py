"""A value is found however the reader of an answer sees it: as it is, in a terminal, in a log, decoded from JSON."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.safety.output.automaton import StreamWatch
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.view import readings
from tests.gateway.safety.output.kit import (
    RULES,
    Rule,
    SmallScanner,
    check_pieces,
    random_pieces,
    random_text,
    rules_of,
    small_rules,
    whole,
)
from tests.gateway.safety.output.test_filter import shared

VALUES = (
    "4111111111111111", "DE89370400440532013000", "123-45-6789", "john.smith@example.com", "AKIAIOSFODNN7EXAMPLE",
    "ghp_" + "a1B2" * 9, "blue heron",
)  # fmt: skip
SEQUENCES = (
    "\x1b[0m", "\x1b[1;31m", "\x9b2J", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x1bP1;2q..\x1b\\", "\x1b(B",
    "\x1b7", "\x1bc", "\x1b[0m\x1b[4m",
)  # fmt: skip
CONTROLS = ("\x00", "\x07", "\x08", "\x1b", "\x7f", "\x80", "\x9c", "\x01\x02")


SPLIT_BY = [
    pytest.param(value, inside, marks=pytest.mark.long if (number + place) % 4 else ())
    for number, inside in enumerate((*SEQUENCES, *CONTROLS))
    for place, value in enumerate(VALUES)
]
"""Each value and each of what splits it; with every one of the others in the long tests."""


@pytest.mark.parametrize(("value", "inside"), SPLIT_BY)
def test_a_split_by_sequences_or_controls_is_found(value: str, inside: str) -> None:
    for at in range(1, len(value)):
        text = f"so {value[:at]}{inside}{value[at:]} it is"
        decision = whole(small_rules(), text)
        assert value[:at] not in decision.text.replace("<", "") or len(value[:at]) < 4
        (edit,) = decision.edits
        assert edit.start == 3
        check_pieces(small_rules(), list(text), decision)


@given(st.sampled_from(VALUES), st.data())
def test_json_escapes_of_any_characters_are_read(value: str, data: st.DataObject) -> None:
    escaped = "".join(f"\\u{ord(char):04x}" if data.draw(st.booleans()) else char for char in value)
    text = f'{{"v": "{escaped}"}}'
    decision = whole(small_rules(), text)
    assert [(one.start, one.end) for one in decision.edits] == [(7, 7 + len(escaped))]
    check_pieces(small_rules(), random_pieces(text, random.Random(escaped)), decision)


ESCAPES = ("\\u0034", "\\n", "\\", "\\u00", "\\u001b[0m", "\\\\")
NOISE = (*SEQUENCES, *CONTROLS, *ESCAPES, "\u200b", "\x1b]", "\x1b[")


@given(st.integers(0, 1 << 32))
def test_noise_anywhere_reads_alike_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    text = random_text(rng)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(text))
        text = text[:at] + rng.choice(NOISE) + text[at:]
    check_pieces(small_rules(), random_pieces(text, rng), whole(small_rules(), text))


PARCELS = {
    "controls": "12\x00345-CD" + "\x00" * 8 + " kg and so on",
    "escapes": "12\\u0033" + "45-CD" + "\\u0020" * 3 + "kg and so on",
    "sequences": "12\x1b[1m345-CD\x1b[0m\x1b[1m kg it is",
}


@pytest.mark.parametrize("text", PARCELS.values(), ids=PARCELS)
def test_what_decides_behind_a_match_may_come_later(text: str) -> None:
    """A reading leaves characters out, so its next eight come later than eight characters."""
    decision = whole(small_rules(), text)
    assert "CD" in decision.text
    check_pieces(small_rules(), list(text), decision)


def test_what_decides_may_stand_in_another_match_under_way() -> None:
    parcel = next(rule for rule in RULES if rule.id == "pii.parcel")
    rules = parcel, Rule("word.heap", r" +kg of z{50,80}!", 100)
    made = rules_of([rule.watched for rule in rules], SmallScanner(rules))
    text = "12\x00345-CD " + "\x00" * 10 + "kg of " + "z" * 70 + "."
    assert not whole(made, text).edits
    check_pieces(made, list(text), whole(made, text))


def test_a_sequence_that_began_long_before_is_read() -> None:
    text = "so \x1b[" + "0;" * 30 + "m4111111111111111 it is"
    decision = whole(small_rules(), text)
    assert len(decision.edits) == 1
    check_pieces(small_rules(), list(text), decision)


@pytest.mark.parametrize("inside", [*SEQUENCES, *CONTROLS, "\\u002d"])
def test_a_canary_blocks_in_every_reading(inside: str) -> None:
    rules = shared({"canaries": ["zebra-7781"]}, actions={})
    dash = "" if inside.startswith("\\") else "-"
    filter_ = OutputFilter(rules)
    shown = "".join(map(filter_.push, f"so zebra{inside}{dash}7781 it is")) + filter_.finish()
    assert (shown, filter_.stopped) == ("so ", ("output.canary",))


def test_removed_sequences_do_not_join_a_secret() -> None:
    rules = shared({"actions": {"output.ansi": "remove"}})
    filter_ = OutputFilter(rules)
    text = "\x1b[1mcard\x1b[0m 4111\x1b[31m1111\x1b[0m11111111."
    shown = "".join(map(filter_.push, text)) + filter_.finish()
    assert shown == "card <PAYMENT_CARD_1>."


def test_an_open_sequence_hides_no_more_than_its_bound() -> None:
    *_, shortest = readings("\x1b]" + "a" * 1000)
    assert 700 < len(shortest.text) < 1000
    watch = StreamWatch(small_rules().automaton)
    watch.feed("4111\x1b]" + "; " * 500)
    assert watch.end - watch.free_to() < 40


def test_readings_agree_again_behind_a_sequence() -> None:
    watch = StreamWatch(small_rules().automaton)
    watch.feed("a \x1b[0m b \\n c and so on ")
    assert not watch.further


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("a\x1b[31mb\x1b[0mc", "abc"),
        ("a\x1b]0;t\x07b", "ab"),
        ("a\x1b]0;t\x1b\\b", "ab"),
        ("a\x1b(Bb", "ab"),
        ("a\x9b1mb\x9d2;t\x9cc", "abc"),
        ("a\x1b[3\nb", "a\nb"),
        ("a\x1b]0;t\x1b[1mb", "ab"),
        ("a\\u0041\\n\\/\\q\\u00", "aA\n/q"),
        ("\\ud83d\\ude00\\u001b[1mx", "x"),
        ("\\\\u0041", "\\u0041"),
        ("\\u00\\u0041", "A"),
    ],
)
def test_one_reading_is_what_a_terminal_shows(text: str, last: str) -> None:
    assert last in [reading.text for reading in readings(text)]
    for reading in readings(text):
        places = zip(reading.text, reading.starts, reading.ends, strict=True)
        assert all(char in text[a:b] or "\\" in text[a:b] for char, a, b in places)
