"""The table of labels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.outcome import Label, labels
from sluice.v1.admin_pb2 import (
    OUTCOME_SOURCE_CASCADE,
    OUTCOME_SOURCE_GRADE,
    OUTCOME_SOURCE_SHADOW,
)

GRADE, SHADOW, CASCADE = OUTCOME_SOURCE_GRADE, OUTCOME_SOURCE_SHADOW, OUTCOME_SOURCE_CASCADE
SHARES = st.floats(0, 1)


def test_a_grade_alone_tells_of_one_side() -> None:
    assert labels(True, None, 0.5) == (None, Label(0.5, GRADE))
    assert labels(False, None, 0.5) == (Label(0.5, GRADE), None)
    assert labels(False, None, None) == (None, None)


@pytest.mark.parametrize("strong_answered", [True, False])
def test_without_a_grade_the_strong_answer_is_the_reference(strong_answered: bool) -> None:
    found = labels(strong_answered, Label(0.25, SHADOW), None)
    assert found == (Label(0.25, SHADOW), Label(1.0, SHADOW))


def test_a_cascade_that_went_over_from_an_unfinished_draft() -> None:
    compared = Label(0.0, CASCADE)
    assert labels(True, compared, None) == (Label(0.0, CASCADE), Label(1.0, CASCADE))
    assert labels(True, compared, 0.5) == (Label(0.0, CASCADE), Label(0.5, GRADE))


def test_the_side_that_was_graded_has_its_grade() -> None:
    assert labels(False, Label(0.0, SHADOW), 0.0) == (Label(0.0, GRADE), Label(1.0, SHADOW))
    assert labels(False, Label(0.3, SHADOW), 1.0) == (Label(1.0, GRADE), Label(1.0, SHADOW))
    assert labels(True, Label(0.5, SHADOW), 0.4) == (Label(0.2, SHADOW), Label(0.4, GRADE))


@given(st.booleans(), SHARES)
def test_answers_that_agree_are_equally_good(strong_answered: bool, grade: float) -> None:
    weak, strong = labels(strong_answered, Label(1.0, SHADOW), grade)
    assert weak is not None
    assert strong is not None
    assert weak.quality == pytest.approx(grade)
    assert strong.quality == pytest.approx(grade)


@given(st.booleans(), SHARES, st.none() | SHARES)
def test_labels_are_shares(strong_answered: bool, agreement: float, grade: float | None) -> None:
    found = labels(strong_answered, Label(agreement, CASCADE), grade)
    for side in found:
        assert side is not None
        assert 0 <= side.quality <= 1
