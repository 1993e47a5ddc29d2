"""Columns of prompts and answers: right for what is known, finite and bounded for anything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.learned import answer, features, grams, prior
from gateway.routing.learned.text import READ_CHARS_MAX, parse


def columns(prompt: str) -> dict[str, float]:
    return dict(zip(features.NAMES, features.describe(parse(prompt)).tolist(), strict=True))


def answered(prompt: str, text: str) -> dict[str, float]:
    row = answer.describe(prompt, text).tolist()
    return {
        name.removeprefix("answer "): value for name, value in zip(answer.NAMES, row, strict=True)
    }


def test_a_question_with_options() -> None:
    found = columns("Which is NOT a prime of 1997?\nA. 2\nB. 4, or 10\nC. I and II\nAnswer:")
    assert (found["options"], found["lines"], found["asks"]) == (3, 5, 1)
    assert (found["options with digits"], found["year"], found["roman choices"]) == (
        np.float32(2 / 3),
        1,
        1,
    )
    assert found["class negation"] == 1
    assert (found["word which"], found["mark ?"], found["mark ."]) == (1, 1, 3)


def test_a_word_problem() -> None:
    found = columns("Ann has 1,250.50 dollars and half as many 3 coins. How many are left?")
    assert (found["numbers"], found["decimals"], found["distinct numbers"]) == (2, 1, 2)
    assert found["quantities"] == 3
    assert found["word many"] == 2


def test_of_a_long_prompt_both_ends_are_read() -> None:
    short = columns("start " + "x" * READ_CHARS_MAX + " then calculate")
    assert short["word calculate"] == 1
    assert short["chars"] > READ_CHARS_MAX
    assert len(parse("a b " * 1_000_000).tokens) <= READ_CHARS_MAX


def test_related_words_share_grams_and_small_words_have_none() -> None:
    first, second = (grams.grams(parse(text)) for text in ("the cardiology", "of biology, Cardiac"))
    assert first == {"cardi-", "-ogy"}
    assert first < second


def test_a_vocabulary_is_what_several_rows_hold() -> None:
    known = grams.learn([parse(text) for text in ("red apples", "red pears", "green apples")])
    assert set(known.index) == {"red-", "-red", "apple-", "-les"}
    indices, weights = known.look_up(parse("red bricks"))
    assert set(indices) == {known.index["red-"], known.index["-red"]}
    assert weights @ weights == pytest.approx(1)


@settings(max_examples=100)
@given(st.text(), st.text())
def test_anything_gives_finite_columns(prompt: str, text: str) -> None:
    row = features.describe(parse(prompt))
    assert row.shape == (len(features.NAMES),)
    assert np.isfinite(row).all()
    judged = answer.describe(prompt, text)
    assert judged.shape == (len(answer.NAMES),)
    assert np.isfinite(judged).all()


@settings(max_examples=100)
@given(st.text(alphabet="0123456789.,+-*/x=()%$<># \nA", max_size=300))
def test_anything_like_a_sum_gives_finite_columns(text: str) -> None:
    assert np.isfinite(features.describe(parse(text))).all()
    assert np.isfinite(answer.describe(text, text)).all()


def test_the_prior_says_chances() -> None:
    chances = prior.load().predict(features.describe(parse("What is 2 + 2?")))
    assert ((chances > 0) & (chances < 1)).all()


def test_an_answer_that_holds_together() -> None:
    prompt = "Ann has 3 bags of 4 apples and eats 2. How many are left?"
    found = answered(prompt, "She has 3*4 = <<3*4=12>>12 and keeps 12-2 = <<12-2=10>>10.\n#### 10")
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
