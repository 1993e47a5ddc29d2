"""Placeholders: stable, free of collisions, and reversible."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.safety.findings import Placeholders, kind_of

TEXTS = st.text(alphabet="<EMAIL_12> ab", max_size=30)


def test_the_same_value_gets_the_same_placeholder() -> None:
    placeholders = Placeholders()
    names = [placeholders.of("pii.email", value) for value in ("a@b", "c@d", "a@b")]
    assert names == ["<EMAIL_1>", "<EMAIL_2>", "<EMAIL_1>"]
    assert placeholders.of("pii.us_ssn", "a@b") == "<US_SSN_1>"


def test_text_that_the_prompt_has_is_never_a_placeholder() -> None:
    prompt = Placeholders(["write <EMAIL_1> and <EMAIL_3>"])
    for placeholders in (prompt.for_answer(), prompt):
        assert placeholders.of("pii.email", "a@b") == "<EMAIL_2>"
        assert placeholders.of("pii.email", "c@d") == "<EMAIL_4>"
        assert placeholders.restore("<EMAIL_1> <EMAIL_2> <EMAIL_9>") == "<EMAIL_1> a@b <EMAIL_9>"


def test_values_are_not_looked_into_again() -> None:
    placeholders = Placeholders()
    placeholders.of("pii.a", "<B_1>")
    placeholders.of("pii.b", "secret")
    assert placeholders.restore("<A_1>") == "<B_1>"


def test_what_the_answer_adds_cannot_be_restored_from_the_prompt() -> None:
    prompt = Placeholders()
    prompt.of("pii.email", "a@b")
    answer = prompt.for_answer()
    assert answer.of("pii.email", "a@b") == "<EMAIL_1>"
    assert answer.of("pii.email", "new@x") == "<EMAIL_2>"
    assert prompt.restore("<EMAIL_2>") == "<EMAIL_2>"
    assert answer.restore("<EMAIL_1> <EMAIL_2>") == "a@b new@x"
    assert dict(answer.values) == {"<EMAIL_1>": "a@b", "<EMAIL_2>": "new@x"}


@given(TEXTS, st.lists(st.text(min_size=1, max_size=5), max_size=6))
def test_a_prompt_with_placeholders_comes_back_as_it_was(text: str, values: list[str]) -> None:
    placeholders = Placeholders([text])
    parts = [placeholders.of("pii.email", value) for value in values]
    assert placeholders.restore(text + "".join(parts)) == text + "".join(values)


NAMES = {
    "pii.us_ssn": "US_SSN",
    "deny.word-7": "WORD_7",
    "x.9": "VALUE_9",
    "x.": "VALUE",
    "x.a1": "A1",
    "x." + "a" * 60: "A" * 48,
}


@pytest.mark.parametrize("rule", NAMES)
def test_names_of_placeholders(rule: str) -> None:
    assert kind_of(rule) == NAMES[rule]
