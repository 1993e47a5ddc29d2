"""Which patterns are accepted, how long their matches get, and that a refusal names the place."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.patterns import PatternError, longest_match, positions_of
from gateway.safety.rules.spec import default_rules
from gateway.safety.rules.validators import VALIDATORS


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("abc", 3, 3),
        (r"a?b{2,5}", 2, 6),
        (r"(?i)\b(?:ab|cde)\b", 2, 3),
        (r"[^\]a-z\d-]{3}", 3, 3),
        (r"(?s:.){2}(a{2}){1,3}", 4, 8),
        (r"\x41\x{1f600}\p{L}\pN", 4, 4),
        (r"^\d{3}$|é", 1, 3),
        (r"a{2,4}?", 2, 4),
        (r"(?P<n>a)(?<m>b)?", 1, 2),
        (r"[]a]{2}[^]b][[:alpha:]][[a]", 5, 5),
        (r"a{x}{,3}\012(?-i:b)(?:a{0}|c)", 10, 11),
    ],
)
def test_width_of_accepted_patterns(pattern: str, least: int, most: int) -> None:
    assert (positions_of(pattern).whole.least, longest_match(pattern)) == (least, most)


@pytest.mark.parametrize(
    ("pattern", "position"),
    [
        ("ab*", 2),
        ("ab+", 2),
        ("a{2,}", 1),
        ("[*]{2}(?:a|b+?)", 12),
        (r"a\Qb\E", 1),
        (r"a\C", 1),
        ("(" * 60 + "a" + ")" * 60, 50),
        ("a?", 0),
        ("", 0),
    ],
)
def test_refused_with_the_position(pattern: str, position: int) -> None:
    with pytest.raises(PatternError) as caught:
        longest_match(pattern)
    assert caught.value.position == position
    assert str(caught.value).startswith(f"position {position}: ")


REFUSED = {
    "(a": "missing ): (a",
    "a)": "unexpected )",
    "[a": "missing ]",
    "a(?=b)": "invalid perl operator: (?=",
    "(?>a)": "invalid perl operator: (?>",
    r"(a)\1": r"invalid escape sequence: \1",
    "a{3,2}": "invalid repetition size: {3,2}",
    "a{1,1001}": "invalid repetition size: {1,1001}",
    "a*+b": "bad repetition operator: *+",
    "[z-a]": "invalid character class range: z-a",
    r"\x{110000}": "invalid escape sequence",
    r"\p{Nope}": "invalid character class range",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_refused_with_the_words_of_the_engine(pattern: str) -> None:
    reason = "the engine refuses the pattern: " + re.escape(REFUSED[pattern])
    with pytest.raises(PatternError, match=reason):
        longest_match(pattern)


@given(st.text(alphabet=r"ab(|)?{}2,[]^\d.*+:", max_size=12))
def test_what_is_accepted_has_the_width_it_says(pattern: str) -> None:
    try:
        least, most = positions_of(pattern).whole.least, longest_match(pattern)
        found = re.search(pattern, "abab2,:d^]}" * 3)
    except (PatternError, re.error):
        return
    assert found is None or least <= len(found.group()) <= most


def test_default_rules_stay_within_their_lengths() -> None:
    assert len({spec.id for spec in default_rules()}) == len(default_rules())
    for spec in default_rules():
        assert spec.validator in VALIDATORS
        for form in spec.forms:
            assert longest_match(form.pattern) <= spec.max_length
            assert spec.context or not form.in_context
            if form.hint:
                longest_match(form.hint)
