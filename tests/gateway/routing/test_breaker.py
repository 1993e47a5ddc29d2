"""Circuit breakers."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.streaming.load_table import PROBE_S, Breakers
from sluice.settings.routing import BreakerRules

SETTINGS = BreakerRules(failures=3, open_s=5.0)


def opened() -> Breakers:
    breakers = Breakers()
    for _ in range(3):
        breakers.failed("m", SETTINGS, 0.0)
    return breakers


def test_only_failures_in_a_row_open_it() -> None:
    breakers = Breakers()
    for _ in range(5):
        breakers.failed("m", SETTINGS, 0.0)
        breakers.failed("m", SETTINGS, 0.0)
        breakers.succeeded("m")
    assert breakers.retry_after_s("m", 0.0) == 0
    assert opened().retry_after_s("m", 4.9) > 0
    assert opened().retry_after_s("other", 0.0) == 0


def test_then_one_probe_at_a_time_goes() -> None:
    breakers = opened()
    assert breakers.retry_after_s("m", 1.0) == 4.0
    assert breakers.retry_after_s("m", 5.0) == 0
    breakers.sent("m", 5.0)
    assert breakers.retry_after_s("m", 5.1) > 0
    breakers.succeeded("m")
    assert breakers.retry_after_s("m", 6.0) == 0


def test_a_failed_probe_opens_it_again() -> None:
    breakers = opened()
    breakers.sent("m", 5.0)
    breakers.failed("m", SETTINGS, 6.0)
    assert breakers.retry_after_s("m", 10.9) > 0
    assert breakers.retry_after_s("m", 11.0) == 0


def test_a_probe_that_said_nothing_lets_the_next_one_go() -> None:
    breakers = opened()
    breakers.sent("m", 5.0)
    breakers.abandoned("m")
    assert breakers.retry_after_s("m", 5.1) == 0
    breakers.sent("m", 5.1)
    assert breakers.retry_after_s("m", 5.2) > 0
    assert breakers.retry_after_s("m", 5.1 + PROBE_S) == 0


@given(st.lists(st.sampled_from(["sent", "succeeded", "failed", "abandoned", "wait"]), max_size=40))
def test_it_never_shuts_a_model_out_for_ever(acts: list[str]) -> None:
    breakers, now = Breakers(), 0.0
    for act in acts:
        if act == "wait":
            now += 3.0
        elif act == "failed":
            breakers.failed("m", SETTINGS, now)
        elif act != "sent":
            getattr(breakers, act)("m")
        elif not breakers.retry_after_s("m", now):
            breakers.sent("m", now)
    assert breakers.retry_after_s("m", now) <= PROBE_S


def test_a_late_success_does_not_close_it() -> None:
    breakers = opened()
    breakers.succeeded("m")
    assert breakers.retry_after_s("m", 4.0) == 1.0
