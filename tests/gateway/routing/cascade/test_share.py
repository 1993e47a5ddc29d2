from gateway.routing.cascade import share
from gateway.routing.cascade.share import Escalations


def test_a_share_of_the_latest_requests_may_go_over() -> None:
    escalations = Escalations()
    attempts = [escalations.began("a") for _ in range(60)]
    allowed = 0
    for attempt in attempts:
        if attempt.may_go_over(0.5):
            attempt.over = True
            allowed += 1
    assert allowed == 30
    attempts[0].over = False  # It began ahead, and was not needed.
    assert attempts[-1].may_go_over(0.5)


def test_what_is_long_past_does_not_count() -> None:
    escalations = Escalations()
    for _ in range(50):
        escalations.began("a").over = True
    assert not escalations.began("a").may_go_over(0.5)
    for _ in range(share.WINDOW - 2):
        escalations.began("a")
    assert escalations.began("a").may_go_over(0.5)


def test_a_few_requests_may_always_go_over_and_tenants_do_not_share() -> None:
    escalations = Escalations()
    for _ in range(share.FREE):
        attempt = escalations.began("a")
        assert attempt.may_go_over(0.01)
        attempt.over = True
    assert not escalations.began("a").may_go_over(0.01)
    assert escalations.began("b").may_go_over(0.01)


def test_tenants_that_were_not_heard_of_for_longest_are_forgotten() -> None:
    escalations = Escalations()
    for _ in range(share.FREE):
        escalations.began("old").over = True
    for number in range(share.TENANTS_MAX):
        escalations.began(f"t{number}")
    assert escalations.began("old").may_go_over(0.01)
