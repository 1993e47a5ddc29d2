"""How far two answers say the same, rule by rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.agreement import agreement, final_choice, final_number


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # 1: the same text
        ("Paris.", "  paris", 1.0),
        ("", "", 1.0),
        # 2: numbers
        ("3 + 4 = 7\nTotal: 7", "Total: 7", 1.0),
        ("Total: 7", "Total: 8", 0.0),
        ("so it is 1,250.50 in all.\n#### 1,250.50", "The answer is 1250.5", 1.0),
        ("\\boxed{12}", "6 + 6 = 12", 1.0),
        ("$12", "It costs: 12 dollars.", 1.0),
        ("-3", "3", 0.0),
        # 3: choices
        ("B", "The answer is (b).", 1.0),
        ("B) because of the tax", "C", 0.0),
        # 4: words
        ("the cat sat", "the cat ran", 2 / 3),
        ("yes", "", 0.0),
        ('{"a": 1, "b": [1, 2]}', '{"b": [1, 2],\n "a": 1}', 1.0),
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 3}', 0.75),
        # A list is no final number.
        ("3, 7, 12", "3, 12, 7", 1.0),
    ],
)
def test_rules(one: str, other: str, expected: float) -> None:
    assert agreement(one, other) == pytest.approx(expected)
    assert agreement(other, one) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 4", None),
        ("it is 12 degrees\nTotal: 30 items", 30.0),
        ("answer: 12\nHave a nice day", 12.0),
        ("meet me at 12:30", None),
        ("2024-05-01", None),
        ("1,2", None),
        ("x = 2", 2.0),
    ],
)
def test_final_numbers(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_a_word_is_no_choice() -> None:
    assert final_choice("A nice day") == ""
    assert final_choice("I choose option C") == "C"


@given(st.text(max_size=60), st.text(max_size=60))
def test_it_is_a_share_and_has_no_sides(one: str, other: str) -> None:
    assert 0 <= agreement(one, other) <= 1
    assert agreement(one, other) == pytest.approx(agreement(other, one))
    assert agreement(one, one) == 1


HOSTILE = (
    "total" + " " * 100_000, "= " * 50_000, "[" * 100_000, "[" * 900 + "]" * 900,
    '{"a":' * 500 + "9" * 4000 + "}" * 500, "9" * 5000, '{"a": [[[1]]]}' + " " * 90_000, "1," * 50_000,
    "answer " * 20_000,
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.timeout(20)
def test_hostile_answers_take_no_time(text: str) -> None:
    assert 0 <= agreement(text, text + "x") <= 1
    assert 0 <= agreement(text, "total 5") <= 1
