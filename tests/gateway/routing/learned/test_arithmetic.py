"""Sums in texts."""

import pytest
from hypothesis import given, settings
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


def test_marked_sums_go_before_written_ones() -> None:
    [found] = arithmetic.sums("so 2+2=5 and <<3*4=12>>12")
    assert (found.operands, found.operators, found.value, found.stated) == ((3, 4), "*", 12, 12)
    assert not found.wrong
    [written] = arithmetic.sums("so 2 + 2 = 5.")
    assert written.wrong


def test_rounding_is_not_wrong() -> None:
    assert not arithmetic.sums("10 / 3 = 3.33")[0].wrong
    assert arithmetic.sums("10 / 3 = 3.5")[0].wrong


def test_work_is_bounded() -> None:
    assert len(arithmetic.sums("1 + 1 = 2. " * 500)) == arithmetic.SUMS_MAX


_NUMBERS = st.integers(1, 999)


@settings(max_examples=100)
@given(_NUMBERS, _NUMBERS, st.sampled_from("+-*"), _NUMBERS, st.sampled_from("+-*"))
def test_agrees_with_python(a: int, b: int, first: str, c: int, second: str) -> None:
    expression = f"{a} {first} {b} {second} {c}"
    # Our own digits and operators only.
    assert arithmetic.evaluate(expression) == eval(expression)
