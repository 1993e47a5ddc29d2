"""What rows say about the speed of workers, and when slots become free."""

from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.core.scheduler.entry import QueueEntry
from batcher.core.scheduler.speed import (
    MEMORY_S,
    REQUESTS_MIN,
    SLOTS_MAX,
    Slots,
    Speeds,
)

BASE_S, PROMPT_TOKEN_S, TOKEN_S = 0.1, 0.01, 0.05


def run(
    speeds: Speeds, prompt: int, tokens: int, at: float, *, slow: float = 1.0, name: str = "bulk"
) -> float:
    """A row from its hand-over until its end; returns when that is."""
    row = QueueEntry("r", name, prompt_tokens=prompt, max_tokens=tokens)
    row.sent_at = at
    speeds.begin(row, at)
    rest_s = slow * TOKEN_S * (tokens - 1)
    end = at + slow * (BASE_S + PROMPT_TOKEN_S * prompt) + rest_s
    speeds.end(row, tokens, rest_s, end)
    return end


def measured(*, is_full: bool = True) -> tuple[Speeds, float]:
    speeds, now = Speeds(), 0.0
    speeds.watch(now, is_full=is_full)
    for prompt, tokens in ((10, 5), (100, 1), (30, 50), (10, 5), (60, 2), (100, 9)):
        now = run(speeds, prompt, tokens, now)
    return speeds, now


def test_prompts_and_answers_have_a_speed_each() -> None:
    speeds, now = measured()
    speed = speeds.of_class("bulk", now)
    assert speed is not None
    assert speed.base_s == pytest.approx(BASE_S, abs=0.02)
    assert speed.prompt_token_s == pytest.approx(PROMPT_TOKEN_S, rel=0.05)
    assert speed.token_s == pytest.approx(TOKEN_S)
    assert speeds.of_class("standard", now) is None, "another class may be slower"


def test_few_rows_say_nothing() -> None:
    speeds, now = Speeds(), 0.0
    speeds.watch(now, is_full=True)
    for _ in range(REQUESTS_MIN - 1):
        now = run(speeds, 10, 5, now)
        assert speeds.of_class("bulk", now) is None
        assert speeds.tokens_per_s(8, now) == 0.0
    now = run(speeds, 10, 5, now)
    assert speeds.of_class("bulk", now) is not None
    assert speeds.tokens_per_s(8, now) == pytest.approx(8 * 15 / (BASE_S + 0.1 + 4 * TOKEN_S))


def test_rows_beside_free_slots_say_nothing() -> None:
    speeds, now = measured(is_full=False)
    assert speeds.of_class("bulk", now) is None


def test_a_row_counts_that_was_mostly_beside_full_slots() -> None:
    for full_s, counts in ((0.4, False), (0.6, True)):
        speeds, now = Speeds(), 0.0
        for _ in range(REQUESTS_MIN):
            row = QueueEntry("r", "bulk")
            row.sent_at = now
            speeds.watch(now, is_full=True)
            speeds.begin(row, now)
            speeds.watch(now + full_s, is_full=False)
            now += 1.0
            speeds.end(row, 1, 0.0, now)
        assert (speeds.of_class("bulk", now) is not None) is counts


def test_one_short_row_behind_long_ones_changes_no_rate() -> None:
    speeds, now = measured()
    before = speeds.tokens_per_s(8, now)
    speeds.watch(now, is_full=True)  # it waits, and is handed out a minute later
    run(speeds, 10, 1, now + 60.0)
    assert speeds.tokens_per_s(8, now + 61.0) == pytest.approx(before, rel=0.2)


def test_an_old_measurement_is_not_known_any_more() -> None:
    speeds, now = measured()
    assert speeds.of_class("bulk", now + MEMORY_S) is None
    assert speeds.tokens_per_s(8, now + MEMORY_S) == 0.0
    later = now + MEMORY_S
    for _ in range(REQUESTS_MIN):
        later = run(speeds, 10, 5, later, slow=3.0)
    speed = speeds.of_class("bulk", later)
    assert speed is not None
    assert speed.token_s == pytest.approx(3 * TOKEN_S), "what was before does not count"


def test_equal_prompts_say_nothing_about_longer_ones() -> None:
    speeds, now = Speeds(), 0.0
    speeds.watch(now, is_full=True)
    for slow in (1.0, 1.1, 0.9, 1.0, 1.05):
        now = run(speeds, 50, 5, now, slow=slow)
    speed = speeds.of_class("bulk", now)
    assert speed is not None
    assert speed.time_s(1, 50, 1) == pytest.approx(BASE_S + 0.5, rel=0.1)
    assert speed.time_s(1, 5000, 1) < 2.0


@given(
    free=st.lists(st.floats(0, 10), min_size=1, max_size=SLOTS_MAX),
    tasks=st.integers(0, 200),
    each_s=st.floats(0.01, 5),
)
def test_tasks_take_the_slot_that_is_free_first(
    free: list[float], tasks: int, each_s: float
) -> None:
    heapify(queue := list(free))
    for _ in range(tasks):
        heappush(queue, heappop(queue) + each_s)
    wait_s = Slots(free).wait_s(tasks, each_s)
    assert wait_s == pytest.approx(queue[0], abs=0.01 + 0.001 * (tasks * each_s))


def test_many_slots_are_represented_by_some() -> None:
    free = [n / 100 for n in range(1000)]
    assert Slots(free).wait_s(500, 20.0) == pytest.approx(5.0, abs=0.2)
    assert Slots(free).wait_s(5000, 10.0) == pytest.approx(50.0, rel=0.05)


def test_without_slots_no_wait_is_known() -> None:
    assert Slots([]).wait_s(5, 1.0) == 0.0
