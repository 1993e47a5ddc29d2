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


TABLE = [
    # Answered by the strong model, compared, grade; weak and strong label.
    (True, None, 0.5, None, Label(0.5, GRADE)),
    (False, None, 0.5, Label(0.5, GRADE), None),
    (False, None, None, None, None),
    (True, Label(0.25, SHADOW), None, Label(0.25, SHADOW), Label(1.0, SHADOW)),
    (False, Label(0.25, SHADOW), None, Label(0.25, SHADOW), Label(1.0, SHADOW)),
    (True, Label(0.0, CASCADE), None, Label(0.0, CASCADE), Label(1.0, CASCADE)),
    (True, Label(0.0, CASCADE), 0.5, Label(0.0, CASCADE), Label(0.5, GRADE)),
    (False, Label(0.0, SHADOW), 0.0, Label(0.0, GRADE), Label(1.0, SHADOW)),
    (False, Label(0.3, SHADOW), 1.0, Label(1.0, GRADE), Label(1.0, SHADOW)),
    (True, Label(0.5, SHADOW), 0.4, Label(0.2, SHADOW), Label(0.4, GRADE)),
]


@pytest.mark.parametrize(("strong_answered", "compared", "grade", "weak", "strong"), TABLE)
def test_labels_follow_the_table(
    strong_answered: bool,
    compared: Label | None,
    grade: float | None,
    weak: Label | None,
    strong: Label | None,
) -> None:
    assert labels(strong_answered, compared, grade) == (weak, strong)


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
