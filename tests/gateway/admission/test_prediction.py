"""How long answers are taken to be, and which tasks count as sent before a request."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.overload import (
    ANSWERS_MIN,
    KINDS_MAX,
    AnswerKind,
    AnswerLengths,
    SentTokens,
)
from sluice.wire.subjects import RANKS

KIND = AnswerKind("m", "a", "w")
STANDARD = RANKS["standard"]


def learned(*tokens: int, is_cut: bool = False, kind: AnswerKind = KIND) -> AnswerLengths:
    lengths = AnswerLengths()
    for one in tokens:
        lengths.observe(kind, one, is_cut=is_cut)
    return lengths


def test_an_unknown_answer_has_one_token_at_least() -> None:
    lengths = learned(*[900] * (ANSWERS_MIN - 1))
    assert lengths.expect(KIND, 0, 900) == (1, False)
    assert lengths.expect(KIND, 50, 900) == (50, False)
    assert lengths.expect(KIND, 0, 0) == (1, False)


@pytest.mark.parametrize(("least", "most", "tokens"), [(0, 1, 1), (40, 40, 40)])
def test_limits_alone_may_say_how_long_an_answer_is(least: int, most: int, tokens: int) -> None:
    assert AnswerLengths().expect(KIND, least, most) == (tokens, True)


def test_an_answer_is_as_long_as_most_or_its_limit() -> None:
    lengths = learned(*[10] * 4, *[30] * 5, *[900] * 4)
    assert lengths.expect(KIND, 0, 0) == (30, True)
    assert lengths.expect(KIND, 0, 2) == (2, True)
    assert lengths.expect(KIND, 60, 900) == (60, True)


@pytest.mark.parametrize("other", [("m", "b", "w"), ("m", "a", "x"), ("n", "a", "w")])
def test_answers_of_others_say_nothing(other: tuple[str, str, str]) -> None:
    lengths = learned(*[900] * 50, kind=AnswerKind(*other))
    assert lengths.expect(KIND, 0, 900) == (1, False)


def test_cut_answers_say_how_long_answers_are_at_least() -> None:
    lengths = learned(*[5] * ANSWERS_MIN, is_cut=True)
    assert lengths.expect(KIND, 0, 900) == (5, False)
    assert lengths.expect(KIND, 0, 4) == (4, True)
    for _ in range(2 * ANSWERS_MIN):
        lengths.observe(KIND, 300, is_cut=False)
    assert lengths.expect(KIND, 0, 900) == (300, True)
    for _ in range(200):
        lengths.observe(KIND, 5, is_cut=True)
    assert lengths.expect(KIND, 0, 900) == (300, True), "short limits make no answer short"


def test_kinds_of_answers_are_bounded() -> None:
    lengths = AnswerLengths()
    for number in range(KINDS_MAX + 1):
        lengths.observe(AnswerKind("m", "a", str(number)), 1, is_cut=False)
    assert len(lengths) == KINDS_MAX


def test_tokens_of_other_tenants_count_by_their_weights() -> None:
    sent = SentTokens()
    for tenant, tokens in (("a", 10), ("b", 1000), ("c", 1000)):
        sent.add(STANDARD, tenant, tokens, 1.0, 0.0)
    sent.add(RANKS["interactive"], "b", 5, 1.0, 0.0)
    sent.add(RANKS["bulk"], "b", 5000, 1.0, 0.0)
    assert sent.tokens_before(STANDARD, "new", {}) == 5
    assert sent.tokens_before(STANDARD, "a", {}) == 5 + 3 * 10
    assert sent.tokens_before(STANDARD, "a", {"a": 2.0}) == 5 + 2 * 10
    assert sent.tokens_before(STANDARD, "b", {}) == 5 + 2010


@given(seed=st.integers(0, 2**32))
def test_sent_tokens_are_those_since_the_report(seed: int) -> None:
    chance, sent = random.Random(seed), SentTokens()
    tasks = [
        (at, chance.randrange(3), chance.choice("ab"), chance.randrange(1, 99)) for at in range(40)
    ]
    reports = sorted(chance.sample(range(40), 3))
    for since, until in pairwise([-1, *reports, 40]):
        for at, rank, tenant, tokens in tasks:
            if since < at <= until:
                sent.add(rank, tenant, tokens, at, since)
        for rank in range(3):
            held = [one for one in tasks if since < one[0] <= until and one[1] <= rank]
            assert sum(sent.tasks[: rank + 1]) == len(held)
            most = sum(one[3] for one in held)
            assert 0 <= sent.tokens_before(rank, "a", {}) <= most
        sent.forget(until)
        assert not any(sent.tasks)
