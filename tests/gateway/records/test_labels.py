"""The table of labels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.labels import Compared, Label, Labels, Source, label

GRADE, SHADOW, CASCADE = Source.GRADE, Source.SHADOW, Source.CASCADE
SHARES = st.floats(0, 1)


def test_a_grade_alone_tells_of_one_side() -> None:
    assert label(True, None, 0.5) == Labels(None, Label(0.5, GRADE))
    assert label(False, None, 0.5) == Labels(Label(0.5, GRADE), None)
    assert label(False, None, None) == Labels(None, None)


@pytest.mark.parametrize("strong_answered", [True, False])
def test_without_a_grade_the_strong_answer_is_the_reference(strong_answered: bool) -> None:
    found = label(strong_answered, Compared(0.25, SHADOW), None)
    assert found == Labels(Label(0.25, SHADOW), Label(1.0, SHADOW))


def test_a_cascade_that_went_over_from_an_unfinished_draft() -> None:
    compared = Compared(0.0, CASCADE)
    assert label(True, compared, None) == Labels(Label(0.0, CASCADE), Label(1.0, CASCADE))
    assert label(True, compared, 0.5) == Labels(Label(0.0, CASCADE), Label(0.5, GRADE))


def test_the_side_that_was_graded_has_its_grade() -> None:
    assert label(False, Compared(0.0, SHADOW), 0.0) == Labels(Label(0.0, GRADE), Label(1.0, SHADOW))
    assert label(False, Compared(0.3, SHADOW), 1.0) == Labels(Label(1.0, GRADE), Label(1.0, SHADOW))
    assert label(True, Compared(0.5, SHADOW), 0.4) == Labels(Label(0.2, SHADOW), Label(0.4, GRADE))


@given(st.booleans(), SHARES)
def test_answers_that_agree_are_equally_good(strong_answered: bool, grade: float) -> None:
    found = label(strong_answered, Compared(1.0, SHADOW), grade)
    assert found.weak is not None
    assert found.strong is not None
    assert found.weak.quality == pytest.approx(grade)
    assert found.strong.quality == pytest.approx(grade)


@given(st.booleans(), SHARES, st.none() | SHARES)
def test_labels_are_shares(strong_answered: bool, agreement: float, grade: float | None) -> None:
    found = label(strong_answered, Compared(agreement, CASCADE), grade)
    for side in (found.weak, found.strong):
        assert side is not None
        assert 0 <= side.quality <= 1
