"""What is counted of calls: each verdict, gaps, and the time until the rate is full again."""

import math

import pytest

from tests.robustness.faults.results import HUNG, Call, Expected, Tally, shown

CALM = Expected((1, 2, 3), "one two three")


def call(*pieces: tuple[int, tuple[int, ...], str], finished: bool = True) -> Call:
    made = Call(question=0, begun=10.0)
    for index, token_ids, text in pieces:
        made.delta(index, token_ids, text)
    made.finished = finished
    return made


WHOLE = (0, (1, 2), "one two"), (2, (3,), " three")


def test_the_calm_answer_is_an_answer() -> None:
    assert call(*WHOLE).verdict(CALM) == "answer"


@pytest.mark.parametrize(
    "tokens", [(1, 9, 3), (1, 2, 3, 4), (2, 3)], ids=["other", "more", "behind"]
)
def test_other_tokens_are_a_different_answer(tokens: tuple[int, ...]) -> None:
    assert call((0, tokens, "")).verdict(CALM) == "different"


def test_another_text_is_a_different_answer() -> None:
    assert call((0, (1, 2, 3), "one two four")).verdict(CALM) == "different"


def test_an_answer_that_ends_early_is_lost() -> None:
    assert call((0, (1, 2), "one two")).verdict(CALM) == "lost"


def test_a_stream_that_ends_without_finished_is_lost() -> None:
    assert call(*WHOLE, finished=False).verdict(CALM) == "lost"


def test_a_call_that_never_ended_is_lost_and_named() -> None:
    hung = call((0, (1,), "one"), finished=False)
    hung.failure = HUNG
    assert hung.verdict(CALM) == "lost"
    line = tally(hung).line("x", [], 0.0, 1.0)
    assert (line.lost, line.hung, line.failed) == (1, 1, {})


def test_an_error_is_a_failure_unless_its_tokens_were_wrong() -> None:
    right, wrong = (call((0, tokens, ""), finished=False) for tokens in ((1, 2), (2, 1)))
    right.failure = wrong.failure = "UNAVAILABLE/SHUTTING_DOWN"
    assert right.verdict(CALM) == "failed"
    assert wrong.verdict(CALM) == "different"
    line = tally(right, wrong).line("x", [], 0.0, 1.0)
    assert line.failed == {"UNAVAILABLE/SHUTTING_DOWN": 2}
    assert not line.exact


def test_a_token_that_comes_twice_is_doubled_and_counted_once() -> None:
    again = call((0, (1, 2), "one two"), (1, (2, 3), " three"))
    assert again.doubled
    assert again.verdict(CALM) == "answer"
    assert not tally(again).line("x", [], 0.0, 1.0).exact


def test_text_that_comes_without_tokens_doubles_nothing() -> None:
    assert not call((0, (1, 2, 3), "one two"), (3, (), " three")).doubled


def test_gaps_count_from_the_call_to_its_end() -> None:
    waited = call(*WHOLE)
    for now in (12.0, 12.5, 15.5):
        waited.event(now)
    assert (waited.gap_s, waited.gap_at) == (3.0, 12.5)
    line = tally(waited, call(*WHOLE)).line("x", [], 0.0, 1.0)
    assert (line.gap_max_s, line.gap_p99_s) == (3.0, 3.0)


def tally(*calls: Call) -> Tally:
    made = Tally(begun=0.0)
    for each in calls:
        made.add(each, CALM)
    return made


def steady(*silent: tuple[float, float]) -> Tally:
    """100 tokens a second for a minute, but nothing within ``silent``."""
    made = Tally(begun=0.0)
    for bucket in range(600):
        now = bucket / 10 + 0.05
        if not any(start <= now < end for start, end in silent):
            made.tokens(10, now)
    return made


def test_a_rate_that_never_falls_is_full_at_once() -> None:
    assert steady().full_rate_after(10.0, 20.0, calm=100.0) == 0.0


def test_the_rate_is_full_when_the_silence_is_over() -> None:
    seconds = steady((10.0, 13.0)).full_rate_after(10.0, 20.0, calm=100.0)
    assert seconds == pytest.approx(3.0, abs=0.3)


def test_a_rate_that_stays_low_is_never_full() -> None:
    assert math.isinf(steady((10.0, 30.0)).full_rate_after(10.0, 20.0, calm=100.0))
    line = steady((10.0, 30.0)).line("x", [10.0], 0.0, 20.0)
    assert line.full_rate_max_s is None
    assert "never" in shown(line)


def test_the_line_has_the_median_and_the_longest_of_all_faults() -> None:
    line = steady((10.0, 11.0), (20.0, 22.0), (30.0, 34.0)).line("x", [10, 20, 30], 0.0, 40.0)
    assert line.faults == 3
    assert line.calm_tokens_per_s == pytest.approx(100.0)
    assert line.full_rate_p50_s == pytest.approx(2.0, abs=0.3)
    assert line.full_rate_max_s == pytest.approx(4.0, abs=0.3)


def test_the_worst_calls_are_those_that_went_wrong() -> None:
    wrong, slow = call((0, (1,), "one")), call(*WHOLE)
    slow.event(19.0)
    made = tally(slow, *(call(*WHOLE) for _ in range(10)), wrong).line("x", [], 0.0, 1.0)
    assert [worst.end for worst in made.worst][:2] == ["lost", "answer"]
    assert made.worst[1].gap_s == 9.0
