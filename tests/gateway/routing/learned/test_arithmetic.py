"""Sums in texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.learned import arithmetic


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("-4/2", -2),
        ("$1,200 x 2", 2400),
        ("20% * 50", 10),
        ("8÷2÷2", 2),
        ("10-3-2", 5),
        (".5*4", 2),
    ],
)
def test_values(expression: str, value: float) -> None:
    assert arithmetic.evaluate(expression) == pytest.approx(value)


@pytest.mark.parametrize(
    "expression", ["", "1/0", "2 3", "(1", "1)", "a+1", "1+" * 60 + "1", "9" * 70, "**", "1+"]
)
def test_what_has_no_value(expression: str) -> None:
    assert arithmetic.evaluate(expression) is None


def test_sums_in_order() -> None:
    text = "so 3 * 4 = 12, 2+2=5 and 5 more are 12+5=17"
    first, second, third = arithmetic.sums(text)
    assert (first.operands, first.operators, first.value, first.stated) == ((3, 4), "*", 12, 12)
    assert (second.is_wrong, third.operands) == (True, (12, 5))
    assert not first.is_wrong


@pytest.mark.parametrize(
    ("text", "operands", "value", "stated"),
    [
        ("5 classes * 15 students = 75 students", (5, 15), 75, 75),
        ("3 (cats) + 9 (dogs) = 12 pets", (3, 9), 12, 12),
        ("300 feet / 60 feet/minute = 5 minutes", (300, 60), 5, 5),
        ("- 2 sauces: $0.25 * 2 = $0.50", (0.25, 2), 0.5, 0.5),
        ("1. 4 + 4 = 8", (4, 4), 8, 8),
        ("It was 7. 1 + 1 = 2", (1, 1), 2, 2),
        ("3 \\* (4 + 5) = 27", (3, 4, 5), 27, 27),
        ("200 / 3 ≈ 66.67", (200, 3), 200 / 3, 66.67),
        ("11 / 30 = 37%", (11, 30), 11 / 30, 37),
        ("5 - 8 = -3", (5, 8), -3, -3),
    ],
)
def test_a_sum_as_people_write_it(
    text: str, operands: tuple[float, ...], value: float, stated: float
) -> None:
    [found] = arithmetic.sums(text)
    assert (found.operands, found.stated) == (operands, stated)
    assert found.value == pytest.approx(value)
    assert not found.is_wrong


def test_a_chain_is_a_sum_for_each_equals_sign() -> None:
    found = arithmetic.sums("8 * 12 + 4 = 96 + 4 = 100 inches")
    assert [each.operands for each in found] == [(8, 12, 4), (96, 4)]
    assert not any(each.is_wrong for each in found)


@pytest.mark.parametrize("text", ["n - 4 * 3 = 5", "2x + 80 = 1760", "3P + 12 = 5", "x = 5", "= ="])
def test_what_holds_unknowns_is_no_sum(text: str) -> None:
    assert arithmetic.sums(text) == []


def test_rounding_is_not_wrong() -> None:
    assert not arithmetic.sums("10 / 3 = 3.33")[0].is_wrong
    assert arithmetic.sums("10 / 3 = 3.5")[0].is_wrong


@pytest.mark.parametrize("count", [20, 21, 60])
def test_a_long_sum_is_read_whole_or_left_out(count: int) -> None:
    ones = " + ".join(["1"] * count)
    for text in (f"{ones} = {count}", f"{count - 1} + 1 = {ones}"):
        found = arithmetic.sums(text)
        assert len(found) == (len(ones) <= arithmetic.EXPRESSION_CHARS_MAX)
        assert not any(each.is_wrong for each in found)


def test_work_is_bounded() -> None:
    assert (
        len(arithmetic.sums(" ".join(f"{at} + 1 = 2." for at in range(500)))) == arithmetic.SUMS_MAX
    )


_NUMBERS = st.integers(1, 999)


@given(_NUMBERS, _NUMBERS, st.sampled_from("+-*"), _NUMBERS, st.sampled_from("+-*"))
def test_agrees_with_python(a: int, b: int, first: str, c: int, second: str) -> None:
    expression = f"{a} {first} {b} {second} {c}"
    # Our own digits and operators only.
    assert arithmetic.evaluate(expression) == eval(expression)
