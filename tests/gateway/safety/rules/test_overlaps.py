"""Which of overlapping findings stand, and how the indicators of an injection add up."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.findings import Finding, Severity
from gateway.safety.rules.indicators import NEAR_CHARS, Indicator, judge, weight_at
from gateway.safety.rules.ruleset import resolved

TEXT = "x" * 100


def finding(rule: str, start: int, end: int, severity: Severity = Severity.MEDIUM) -> Finding:
    return Finding(rule, start, end, severity)


def test_the_more_severe_wins_then_the_longer_then_the_left() -> None:
    secret = finding("secret.a", 5, 10, Severity.CRITICAL)
    assert resolved(TEXT, [finding("pii.a", 5, 10), secret]) == [secret]
    assert resolved(TEXT, [finding("pii.a", 5, 8), finding("pii.b", 5, 10)]) == [
        finding("pii.b", 5, 10)
    ]
    both = [finding("pii.a", 0, 4), finding("pii.b", 2, 6)]
    assert resolved(TEXT, both) == [finding("pii.a", 0, 4), finding("pii.b", 4, 6)]


def test_what_is_left_over_without_letters_goes() -> None:
    assert resolved("abcd -", [finding("pii.a", 0, 4, Severity.HIGH), finding("pii.b", 2, 6)]) == [
        finding("pii.a", 0, 4, Severity.HIGH)
    ]


def test_families_that_do_not_compete() -> None:
    three = [finding("injection.a", 0, 9), finding("limit.a", 0, 9), finding("pii.a", 0, 9)]
    assert resolved(TEXT, three) == three


@given(
    st.lists(
        st.builds(
            lambda rule, start, size, severity: finding(rule, start, start + size, severity),
            st.sampled_from(["pii.a", "pii.b", "secret.c", "deny.d"]),
            st.integers(0, 80),
            st.integers(1, 20),
            st.sampled_from(Severity),
        ),
        max_size=25,
    ),
    st.randoms(),
)
def test_nothing_claimed_is_lost_or_claimed_twice(findings: list[Finding], rng: object) -> None:
    claimed = {at for each in findings for at in range(each.start, each.end)}
    standing = [at for each in resolved(TEXT, findings) for at in range(each.start, each.end)]
    assert sorted(standing) == sorted(claimed)
    assert resolved(TEXT, findings) == resolved(TEXT, list(reversed(findings)))


def test_signs_nearby_add_up_and_signs_far_apart_do_not() -> None:
    near = [Indicator("injection.a", 0, 10, 2), Indicator("injection.b", 50, 60, 3)]
    assert {each.severity for each in judge(near)} == {Severity.CRITICAL}
    far = [
        Indicator("injection.a", 0, 10, 2),
        Indicator("injection.b", NEAR_CHARS + 60, NEAR_CHARS + 70, 3),
    ]
    assert [each.severity for each in judge(far)] == [Severity.MEDIUM, Severity.HIGH]
    same = [Indicator("injection.a", at, at + 5, 2) for at in range(0, 60, 6)]
    assert {each.severity for each in judge(same)} == {Severity.MEDIUM}


def test_what_is_quoted_or_talked_about_weighs_less() -> None:
    assert weight_at("x" * 60, 40, 3) == 3
    assert weight_at("x" * 39 + '"' + "x" * 20, 40, 3) == 1
    assert weight_at("This attack is an example of".ljust(60), 40, 3) == 1
