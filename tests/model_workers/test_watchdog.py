import pytest

from model_workers.watchdog import FACTOR, FIRST_LIMIT_S, LIMIT_S, TICK_S, Watchdog


def stepped(*steps: tuple[int, float]) -> Watchdog:
    """A watchdog after steps of so many tokens and seconds."""
    watchdog = Watchdog()
    for tokens, took_s in steps:
        watchdog.begin(tokens, 0.0)
        watchdog.end(took_s, is_step=True)
    return watchdog


def limit_s(watchdog: Watchdog, tokens: int) -> float:
    """How long work of so many tokens may take, by looking at it."""
    watchdog.begin(tokens, 100.0)
    now = 100.0
    while not watchdog.overdue_s(now):
        now += TICK_S / 2
    return now - 100.0


@pytest.mark.parametrize(
    ("steps", "tokens", "expected_s"),
    [
        ([], 1, FIRST_LIMIT_S),
        ([(8, 0.005)], 8, LIMIT_S),
        ([(8, 0.005), (8, 2.0), (8, 0.005)], 8, FACTOR * 2.0),
        ([(8, 10.0)], 8, FACTOR * 10.0),
        # A prompt after steps of one token each may take as long as its tokens would have.
        ([(1, 0.005)], 400, FACTOR * 400 * 0.005),
        ([(1, 0.005)], 100_000, FIRST_LIMIT_S),
    ],
)
def test_the_limit_follows_the_recent_steps(
    steps: list[tuple[int, float]], tokens: int, expected_s: float
) -> None:
    assert limit_s(stepped(*steps), tokens) == pytest.approx(expected_s, abs=TICK_S)


def test_commands_between_steps_have_a_limit_and_teach_nothing() -> None:
    watchdog = stepped((1, 0.01))
    watchdog.begin(0, 0.0)
    watchdog.end(50.0, is_step=False)
    assert limit_s(watchdog, 1) == pytest.approx(LIMIT_S, abs=TICK_S)


def test_an_engine_without_work_does_not_hang() -> None:
    watchdog = stepped((1, 0.01))
    assert not any(watchdog.overdue_s(now) for now in range(100))


def test_a_process_that_was_stopped_does_not_hang() -> None:
    watchdog = stepped((1, 0.01))
    watchdog.begin(1, 0.0)
    assert not watchdog.overdue_s(0.1)
    assert not watchdog.overdue_s(8.1)
    watchdog.end(8.2, is_step=True)
