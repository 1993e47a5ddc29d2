"""Columns of prompts and answers: right for what is known, finite and bounded for anything."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.learned import answer
from gateway.routing.learned.features import HASHED, READ_CHARS_MAX, buckets


def answered(prompt: str, text: str) -> dict[str, float]:
    return dict(answer.describe(prompt, text))


def test_of_a_long_prompt_both_ends_are_read() -> None:
    long = "start " + "x" * READ_CHARS_MAX + " then calculate?"
    apart = buckets("start"), buckets("calculate"), buckets("?")
    assert all(set(each) & set(buckets(long)) for each in apart)
    assert len(buckets("a b " * 1_000_000)) < 20


def test_buckets_are_the_same_in_every_process_and_come_once() -> None:
    found = buckets("The sky, the sea").tolist()
    assert found == sorted(set(found))
    assert found == [878, 1857, 7500, 16695, 17470, 20165, 26763, 28134, 29935]


@given(st.text())
def test_anything_gives_buckets(prompt: str) -> None:
    found = buckets(prompt)
    assert len(found)
    assert 0 <= found.min() <= found.max() < HASHED


@given(st.text(), st.text())
def test_anything_gives_finite_columns(prompt: str, text: str) -> None:
    row = answer.columns(prompt, text)
    assert row.shape == (len(answer.NAMES),)
    assert np.isfinite(row).all()


@given(st.text(alphabet="0123456789.,+-*/x=()%$<># \nA", max_size=300))
def test_anything_like_a_sum_gives_finite_columns(text: str) -> None:
    assert np.isfinite(answer.columns(text, text)).all()


def test_an_answer_that_holds_together() -> None:
    prompt = "Ann has 3 bags of 4 apples and eats 2. How many are left?"
    found = answered(prompt, "She has 3*4 = 12 and keeps 12-2 = <<12-2=10>>10.\nThe answer is 10")
    names = ("sums", "any wrong", "unfinished", "unused results", "unmentioned share")
    assert [found[name] for name in names] == [2, 0, 0, 0, 0]


def test_an_answer_that_does_not() -> None:
    prompt = "Ann has 3 bags of 4 apples and eats 2. How many are left?"
    found = answered(prompt, "However, 3 x 4 = 13. She has 55 + 9 = 64.5, half is 6.5 and")
    names = ("sums", "wrong sums", "fractions", "unfinished", "says however", "unused results")
    assert [found[name] for name in names] == [2, 2, 1, 1, 1, 1]
    assert found["unmentioned share"] == 1 / 4


def test_operations_that_the_prompt_asks_for() -> None:
    found = answered("What is left when they are split equally?", "It is 5 + 5 = 10.")
    assert (found["missing operations"], found["additions"]) == (3, 1)


def test_options_that_are_chosen_and_lines_that_come_again() -> None:
    found = answered("Which?\nA. one\nB. two", "B. It is not A.\nOr?\nOr?")
    assert (found["choices"], found["repeated lines"]) == (2, 1)
    assert answered("Which?", "It is one.")["choices"] == 0
