"""Checks of whole answers: sums and JSON."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.cascade import WholeAnswer, is_json, sums_add_up


def whole(text: str, wants_json: bool = False) -> WholeAnswer:
    return WholeAnswer(text, truncated=False, wants_json=wants_json)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2 + 2 = 4",
        "First 12 * 3 = 36, then 36 - 6 = 30.",
        "She pays $1,250.50 + $10 = $1260.50",
        "10 / 4 = 2.5 and 10/3 = 3.33",
        "2 + 3 * 4 = 14",
        "7-9=-2",
        "x = 5",
        "2 / 0 = 7",  # says nothing that could be checked
        "20% * 50 = 10",
        "1 + 1 = 2 + 0",  # the right side goes on
    ],
)
def test_what_holds_or_cannot_be_read_is_no_fault(text: str) -> None:
    assert sums_add_up(whole(text)) == ""


@pytest.mark.parametrize(
    "text",
    [
        "2 + 2 = 5",
        "12 * 3 = 36, then 36 - 6 = 31",
        "1,000 - 1 = 1,001",
        "2 x 3 = 7",
        "10 / 4 = 4.5",
        "5,000 + 5,000 = 10,001",
    ],
)
def test_what_does_not_add_up_is_found(text: str) -> None:
    assert sums_add_up(whole(text))


# Five factors stay below 1e15, beyond which nothing is worked out.
@given(
    st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 999)), min_size=1, max_size=4),
    st.integers(0, 999),
    st.sampled_from([0, 0, 3, -7]),
)
def test_any_chain_of_integers(rest: list[tuple[str, int]], first: int, off: int) -> None:
    expression = str(first) + "".join(f" {operator} {number}" for operator, number in rest)
    right = eval(expression) + off
    assert bool(sums_add_up(whole(f"so {expression} = {right}."))) is (off != 0)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_json_is_json(value: Any) -> None:
    text = json.dumps(value)
    assert is_json(whole(text, wants_json=True)) == ""
    assert is_json(whole(text + "}", wants_json=True))
    assert is_json(whole(text + "}")) == ""
