"""What is counted of calls: each verdict, gaps, and the time until the rate is full again."""

import math

import pytest

from tests.robustness.faults.results import HUNG, Call, Expected, Tally, shown

CALM = Expected((1, 2, 3), "one two three")
WHOLE = (0, (1, 2), "one two"), (2, (3,), " three")
Pieces = tuple[tuple[int, tuple[int, ...], str], ...]


def call(*pieces: tuple[int, tuple[int, ...], str], failure: str | None = None) -> Call:
    made = Call(question=0, begun=10.0, failure=failure)
    for index, token_ids, text in pieces:
        made.delta(index, token_ids, text)
    made.finished = failure is None
    return made


def tally(*calls: Call) -> Tally:
    made = Tally(begun=0.0)
    for each in calls:
        made.add(each, CALM)
    return made


@pytest.mark.parametrize(
    ("pieces", "failure", "verdict"),
    [
        (WHOLE, None, "answer"),
        (((0, (1, 9, 3), ""),), None, "different"),
        (((0, (1, 2, 3, 4), ""),), None, "different"),
        (((0, (2, 3), ""),), None, "different"),
        (((0, (1, 2, 3), "one two four"),), None, "different"),
        (((0, (1, 2), "one two"),), None, "lost"),
        (((0, (1,), "one"),), HUNG, "lost"),
        (((0, (1, 2), ""),), "UNAVAILABLE/SHUTTING_DOWN", "failed"),
        (((0, (2, 1), ""),), "UNAVAILABLE/SHUTTING_DOWN", "different"),
        (((0, (1, 2), "one two"), (1, (2, 3), " three")), None, "answer"),
    ],
)
def test_verdict_of_a_call(pieces: Pieces, failure: str | None, verdict: str) -> None:
    made = call(*pieces, failure=failure)
    assert made.verdict(CALM) == verdict
    line = tally(made).line("x", [], 0.0, 1.0)
    assert line.exact == (verdict in ("answer", "failed") and not made.doubled)
    assert (line.hung, line.failed) == (
        (1, {}) if failure == HUNG else (0, {failure: 1} if failure else {})
    )


def test_only_a_token_that_comes_twice_is_doubled() -> None:
    assert call((0, (1, 2), "one two"), (1, (2, 3), " three")).doubled
    assert not call((0, (1, 2, 3), "one two"), (3, (), " three")).doubled


def test_a_stream_that_ends_without_finished_is_lost() -> None:
    made = call(*WHOLE)
    made.finished = False
    assert made.verdict(CALM) == "lost"


def test_gaps_count_from_the_call_to_its_end() -> None:
    waited = call(*WHOLE)
    for now in (12.0, 12.5, 15.5):
        waited.event(now)
    assert (waited.gap_s, waited.gap_at) == (3.0, 12.5)
    line = tally(waited, call(*WHOLE)).line("x", [], 0.0, 1.0)
    assert (line.gap_max_s, line.gap_p99_s) == (3.0, 3.0)


def steady(*silent: tuple[float, float]) -> Tally:
    """100 tokens a second for a minute, but nothing within ``silent``."""
    made = Tally(begun=0.0)
    for bucket in range(600):
        now = bucket / 10 + 0.05
        if not any(start <= now < end for start, end in silent):
            made.tokens(10, now)
    return made


@pytest.mark.parametrize(
    ("silent", "seconds"), [((0.0, 0.0), 0.0), ((10.0, 13.0), 3.0), ((10.0, 30.0), math.inf)]
)
def test_the_rate_is_full_when_the_silence_is_over(
    silent: tuple[float, float], seconds: float
) -> None:
    found = steady(silent).full_rate_after(10.0, 20.0, calm=100.0)
    assert found == pytest.approx(seconds, abs=0.3)
    line = steady(silent).line("x", [10.0], 0.0, 20.0)
    assert ("never" in shown(line)) == math.isinf(seconds) == (line.full_rate_max_s is None)


def test_the_line_has_the_median_and_the_longest_of_all_faults() -> None:
    line = steady((10.0, 11.0), (20.0, 22.0), (30.0, 34.0)).line("x", [10, 20, 30], 0.0, 40.0)
    assert (line.faults, line.calm_tokens_per_s) == (3, pytest.approx(100.0))
    assert line.full_rate_p50_s == pytest.approx(2.0, abs=0.3)
    assert line.full_rate_max_s == pytest.approx(4.0, abs=0.3)


def test_the_worst_calls_are_those_that_went_wrong() -> None:
    wrong, slow = call((0, (1,), "one")), call(*WHOLE)
    slow.event(19.0)
    made = tally(slow, *(call(*WHOLE) for _ in range(10)), wrong).line("x", [], 0.0, 1.0)
    assert [worst.end for worst in made.worst][:2] == ["lost", "answer"]
    assert made.worst[1].gap_s == 9.0
