"""Columns of prompts and answers: right for what is known, finite and bounded for anything."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.learned import answer, features
from gateway.routing.learned.features import READ_CHARS_MAX, parse
from gateway.routing.learned.model import answer_example, prompt_example


def columns(prompt: str) -> dict[str, float]:
    return dict(features.describe(parse(prompt)))


def answered(prompt: str, text: str) -> dict[str, float]:
    row = answer.describe(prompt, text)
    return {name.removeprefix("answer "): value for name, value in row.items()}


def test_a_question_with_options() -> None:
    found = columns("Which is NOT a prime of 1997?\nA. 2\nB. 4, or 10\nC. I and II\nAnswer:")
    assert (found["options"], found["lines"], found["asks"]) == (3, 5, 1)
    assert (found["options with digits"], found["year"], found["roman choices"]) == (
        pytest.approx(2 / 3),
        1,
        1,
    )
    assert found["negation share"] > 0
    assert (found["mark ?"], found["mark ."]) == (1, 3)


def test_a_word_problem() -> None:
    found = columns("Ann has 1,250.50 dollars and half as many 3 coins. How many are left?")
    assert (found["numbers"], found["decimals"], found["distinct numbers"]) == (2, 1, 2)
    assert found["quantities"] == 3


def test_of_a_long_prompt_both_ends_are_read() -> None:
    short = columns("start " + "x" * READ_CHARS_MAX + " then calculate?")
    assert (short["asks"], short["words"]) == (1, 5)
    assert short["chars"] > READ_CHARS_MAX
    assert len(parse("a b " * 1_000_000).tokens) <= READ_CHARS_MAX


@given(st.text(), st.text())
def test_anything_gives_finite_columns(prompt: str, text: str) -> None:
    row = prompt_example(prompt).columns
    assert row.shape == (len(features.NAMES),)
    assert np.isfinite(row).all()
    both = answer_example(prompt, text).columns
    assert both.shape == (len(features.NAMES) + len(answer.NAMES),)
    assert np.isfinite(both).all()


@given(st.text(alphabet="0123456789.,+-*/x=()%$<># \nA", max_size=300))
def test_anything_like_a_sum_gives_finite_columns(text: str) -> None:
    assert np.isfinite(answer_example(text, text).columns).all()


def test_an_answer_that_holds_together() -> None:
    prompt = "Ann has 3 bags of 4 apples and eats 2. How many are left?"
    found = answered(prompt, "She has 3*4 = 12 and keeps 12-2 = <<12-2=10>>10.\nThe answer is 10")
    assert (found["sums"], found["any wrong"], found["unused"], found["foreign operands"]) == (
        2,
        0,
        0,
        0,
    )
    assert (found["marked"], found["last sum"], found["unfinished"], found["unused results"]) == (
        1,
        1,
        0,
        0,
    )


def test_an_answer_that_does_not() -> None:
    prompt = "Ann has 3 bags of 4 apples and eats 2. How many are left?"
    found = answered(prompt, "However, 3 x 4 = 13. She has 55 + 9 = 64, half is 6.5 and")
    assert (found["sums"], found["wrong sums"], found["unused"]) == (2, 1, 1)
    assert (found["unfinished"], found["fraction of how many"], found["says however"]) == (1, 1, 1)
    assert found["foreign operands"] == 2
    assert found["unused results"] == 1


def test_operations_that_the_prompt_asks_for() -> None:
    found = answered("What is left when they are split equally?", "It is 5 + 5 = 10.")
    assert (found["missing -"], found["missing /"], found["missing +"]) == (1, 2, 0)


def test_choices() -> None:
    found = answered("Which?\nA. one\nB. two", "B. It is not A.")
    assert (found["chooses"], found["choices"]) == (1, 2)
    assert answered("Which?", "It is one.")["chooses"] == 0
