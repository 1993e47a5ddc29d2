from gateway.upstream import cascade
from gateway.upstream.cascade import EscalationLimiter


def test_a_share_of_the_latest_requests_may_go_over() -> None:
    escalations = EscalationLimiter()
    attempts = [escalations.started("a") for _ in range(60)]
    allowed = 0
    for attempt in attempts:
        if attempt.may_escalate(0.5):
            attempt.escalated = True
            allowed += 1
    assert allowed == 30
    attempts[0].escalated = False  # It began ahead, and was not needed.
    assert attempts[-1].may_escalate(0.5)


def test_what_is_long_past_does_not_count() -> None:
    escalations = EscalationLimiter()
    for _ in range(50):
        escalations.started("a").escalated = True
    assert not escalations.started("a").may_escalate(0.5)
    for _ in range(cascade.WINDOW - 2):
        escalations.started("a")
    assert escalations.started("a").may_escalate(0.5)


def test_a_few_may_always_escalate_tenants_do_not_share() -> None:
    escalations = EscalationLimiter()
    for _ in range(cascade.ALWAYS_ALLOWED):
        attempt = escalations.started("a")
        assert attempt.may_escalate(0.01)
        attempt.escalated = True
    assert not escalations.started("a").may_escalate(0.01)
    assert escalations.started("b").may_escalate(0.01)


def test_tenants_that_were_idle_longest_are_forgotten() -> None:
    escalations = EscalationLimiter()
    for _ in range(cascade.ALWAYS_ALLOWED):
        escalations.started("old").escalated = True
    for number in range(cascade.TENANTS_MAX):
        escalations.started(f"t{number}")
    assert escalations.started("old").may_escalate(0.01)
