"""Repetition."""

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.rules.payloads import repetitions
from gateway.safety.rules.ruleset import RuleSet

RULES = RuleSet(())


def noise(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choices(string.ascii_lowercase + "     \n", k=count))


def rules_of(text: str) -> list[str]:
    return [each.rule for each in RULES.scan(text)]


@given(st.integers(1, 256), st.integers(1600, 6000), st.integers(0, 2000), st.integers(0, 2000))
def test_every_long_repetition_is_found_where_it_is(
    period: int, length: int, before: int, after: int
) -> None:
    unit = noise(period, period)
    stretch = (unit * (length // period + 1))[:length]
    text = noise(1, before) + stretch + noise(2, after)
    found = list(repetitions(text, 1000))
    assert len(found) == 1
    start, end = found[0]
    assert start <= before + 300
    assert abs(end - (before + length)) <= 256


def test_ten_thousand_times_a() -> None:
    found = [each for each in RULES.scan("a" * 10_000) if each.rule == "limit.repetition"]
    assert [(each.start, each.end) for each in found] == [(0, 10_000)]


@pytest.mark.parametrize(
    "text", [noise(3, 50_000), "-" * 200 + "\n" + noise(4, 900), "| a | b |\n" * 60, ""]
)
def test_ordinary_text_repeats_little(text: str) -> None:
    assert rules_of(text) == []


def test_answers_are_not_limited() -> None:
    rules = RuleSet((), is_prompt=False)
    assert rules.scan("a" * 500_000 + "\u0301" * 20) == []
