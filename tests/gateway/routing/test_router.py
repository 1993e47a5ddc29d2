"""Pinned models and rules."""

import pytest

from gateway.routing.features import Features, Governed, count_numbers
from gateway.routing.router import Plan, RuleRouter
from sluice.settings import RouteRule, RoutingSettings

TIERS = {"small": "s", "large": "l"}


def router(*rules: RouteRule) -> RuleRouter:
    return RuleRouter(RoutingSettings(default="small", rules=rules), TIERS)


def test_a_named_model_is_taken_as_it_is() -> None:
    rule = RouteRule(model="small", min_numbers=1, reason="numbers")
    plan = router(rule).plan(Features("large", numbers=9))
    assert plan == Plan("large", "l", "pinned", "the request names the model")


def test_the_safety_policy_goes_before_the_caller() -> None:
    plan = router().plan(Features("small", governed=Governed("large", "injection.override")))
    reason = "the safety policy sends injection.override here"
    assert plan == Plan("large", "l", "safety", reason)


def test_the_first_rule_that_holds_decides() -> None:
    rules = (
        RouteRule(model="large", min_numbers=4, reason="many"),
        RouteRule(model="small", min_numbers=1, reason="some"),
    )
    assert router(*rules).plan(Features(None, numbers=4)) == Plan("large", "l", "rules", "many")
    assert router(*rules).plan(Features(None, numbers=1)).reason == "some"


def test_without_a_rule_the_default_answers() -> None:
    plan = router(RouteRule(model="large", min_numbers=4, reason="many")).plan(Features(None))
    assert plan.model == "small"


def test_all_conditions_of_a_rule_must_hold() -> None:
    rule = RouteRule(model="large", min_prompt_tokens=10, labels={"team": "a"}, reason="both")
    made = router(rule)
    assert made.needs_prompt_tokens
    assert made.plan(Features(None, prompt_tokens=10, labels={"team": "a"})).model == "large"
    assert made.plan(Features(None, prompt_tokens=10, labels={"team": "b"})).model == "small"
    assert made.plan(Features(None, prompt_tokens=9, labels={"team": "a"})).model == "small"


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("one 1", 1), ("1, 2 and 3", 3), ("3,4,5", 3), ("1,250.50 EUR", 1), ("A-17 x", 1)],
)
def test_numbers_are_counted(text: str, count: int) -> None:
    assert count_numbers(text) == count
