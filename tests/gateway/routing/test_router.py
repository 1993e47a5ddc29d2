"""The questions of the router, one by one."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest

from gateway.routing.features import Features
from gateway.routing.learned.model import Estimate, HeadKey, LearnedHead, policy_key
from gateway.routing.router import SHADOW, Plan, Router, RoutingState, check_patterns, drawn
from sluice.settings import SettingsError
from sluice.settings.models import ModelSettings
from sluice.settings.routing import RoutingSettings, Trial
from sluice.v1.admin_pb2 import ROUTER_HEAD_PROMPT
from sluice.wire.clock import ms_of

MODELS = {
    name: ModelSettings(name=name, path=name, tier=tier, prompt_price=price, answer_price=2 * price)
    for name, tier, price in (("small", "s", 1.0), ("large", "l", 10.0), ("next", "l", 10.0))
}
LEARNED = {
    "artefact": "x",
    "weak": "small",
    "strong": "large",
    "target": {"strong_share": 0.3},
}
CASCADE = {"first": "small", "second": "large"}


def long_prompts(policy: str) -> LearnedHead:
    """A learned router that sends what is long to the strong model."""

    def score(prompt: str, _: str) -> Estimate:
        return Estimate(0.25 if len(prompt) > 10 else 0.0, 0.5, 0.75)

    by = HeadKey(policy_key(policy), "r1", ROUTER_HEAD_PROMPT)
    return LearnedHead(by, ("small", "large"), score, 0.2, np.zeros(1, np.float32))


def plan(
    settings: dict[str, Any],
    features: Features,
    waits: Mapping[str, float] = {},
    spent: Mapping[str, float] = {},
    fitting: Collection[str] = tuple(MODELS),
) -> Plan:
    """``waits``: by model; ``spent``: by tenant; ``fitting``: models that have room."""
    routing = RoutingSettings(**settings)
    heads = map(long_prompts, ("", *routing.policies))
    state = RoutingState(
        wait_s=lambda model: waits.get(model, 0.0),
        spent=lambda tenant: spent.get(tenant, 0.0),
        fits=lambda model: model in fitting,
    )
    return Router(routing, MODELS, heads, "v1").plan(features, state)


def auto(text: str = "", **fields: Any) -> Features:
    return Features(None, text=text, **fields)


NO_ROOM = "the context of small has no room for the request"
RULE = {"rules": [{"model": "small", "min_numbers": 1, "reason": "numbers"}], "default": "large"}
LOAD = {"load": {"max_wait_s": 1, "model": "small"}, "default": "large"}
CANARY = {"canaries": [{"model": "small", "of": "large", "share": 1}], "default": "large"}
SPENT = {"budgets": [{"per_hour": 1, "model": "small"}], "default": "large"}


@pytest.mark.parametrize(
    ("settings", "model", "reason"),
    [
        ({"default": "small"}, "large", f"no rule matched: the default model; {NO_ROOM}"),
        (RULE, "large", f"numbers; {NO_ROOM}"),
        ({"learned": LEARNED, "default": "small"}, "large", "room"),
        (LOAD, "large", "default"),
        (CANARY, "large", "default"),
        (SPENT, "large", "but the context of small has no room"),
    ],
    ids=["default", "rule", "learned", "load", "canary", "budget"],
)
def test_models_without_room_are_passed_over(
    settings: dict[str, Any], model: str, reason: str
) -> None:
    features, waits = auto("1 2 3", tenant="acme"), {"large": 5.0}
    assert plan(settings, features, waits, {"acme": 2}, ("large", "next")).model == model
    found = plan(settings, features, waits, {"acme": 2}, ("large", "next"))
    assert reason in found.reason


def test_another_server_gets_nothing_it_was_not_named_for() -> None:
    server: Any = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    far = ModelSettings(name="far", path="small", tier="l", engine="openai", server=server)
    for settings, model in (({}, "near"), ({"fallbacks": {"near": ["far"]}}, "far")):
        routing = RoutingSettings(default="near", **settings)
        near = ModelSettings(name="near", path="near", tier="s")
        router = Router(routing, {"near": near, "far": far})
        assert router.plan(auto("hi"), RoutingState(fits=lambda name: name == "far")).model == model


RULES = [
    {"model": "large", "min_numbers": 4, "reason": "many"},
    {"model": "next", "min_numbers": 1, "labels": {"team": "a"}, "reason": "some"},
]
SELECT = {
    "policies": {"one": {"default": "large"}, "two": {"default": "next"}},
    "select": [
        {"policy": "one", "tenants": ["acme"], "labels": {"team": "a"}},
        {"policy": "two", "tenants": ["acme"]},
    ],
}
BUDGET = {"budgets": [{"tenants": ["acme"], "per_hour": 2, "model": "small"}], "learned": LEARNED}
GOVERNED = Features("small", governed=("large", "injection.override"))
LONG = "a long prompt"
ACME: dict[str, Any] = {"tenant": "acme"}
TEAM: dict[str, Any] = {"labels": {"team": "a"}}
OVER = {"spent": {"acme": 2.0, "default": 99.0}}


@pytest.mark.parametrize(
    ("settings", "features", "state", "route", "reason"),
    [
        (RULE | {"cascade": CASCADE}, Features("large", text="1 2"), {}, "large pinned", "names"),
        (SPENT | CANARY, GOVERNED, OVER, "large safety", "sends injection.override here"),
        ({"rules": RULES}, auto("1 2 3 4", **TEAM), {}, "large rules", "many"),
        ({"rules": RULES}, auto("1", **TEAM), {}, "next rules", "some"),
        ({"rules": RULES}, auto("1"), {}, "small rules", "default"),
        ({"rules": RULES}, auto(**TEAM), {}, "small rules", "default"),
        (SELECT, auto(**ACME, **TEAM), {}, "large rules one", "default"),
        (SELECT, auto(**ACME), {}, "next rules two", "default"),
        (SELECT, auto(**TEAM), {}, "small rules", "default"),
        (BUDGET, auto(LONG, **ACME), OVER, "small budget", "acme has spent its 2"),
        (BUDGET, auto(LONG), OVER, "large learned", "gain"),
        (BUDGET, auto(LONG, **ACME), {}, "large learned", "gain"),
        (LOAD, auto(), {"waits": {"large": 1.5}}, "small load", "1.5 s"),
        (LOAD, auto(), {"waits": {"large": 1.0}}, "large rules", "default"),
        ({"cascade": CASCADE}, auto(), {}, "small cascade", "large where it is in doubt"),
        ({"cascade": CASCADE}, auto(), {"fitting": ["small"]}, "small rules", "default"),
        (BUDGET | {"cascade": CASCADE}, auto(LONG, **ACME), OVER, "small budget", "has spent its"),
        (BUDGET | {"cascade": CASCADE}, auto("", **ACME), OVER, "small budget", "has spent its"),
    ],
)
def test_plan_names_model_strategy_policy_and_reason(
    settings: dict[str, Any], features: Features, state: dict[str, Any], route: str, reason: str
) -> None:
    result = plan(settings, features, **state)
    assert f"{result.model} {result.strategy_word} {result.policy}".strip() == route
    assert reason in result.reason
    assert (result.cascade is not None) == (result.strategy_word == "cascade")


@pytest.mark.parametrize(
    ("condition", "fits", "fails"),
    [
        ({"min_prompt_tokens": 10}, auto(prompt_tokens=10), auto(prompt_tokens=9)),
        ({"max_prompt_chars": 3}, auto("abc"), auto("abcd")),
        ({"labels": {"team": "a"}}, auto(labels={"team": "a"}), auto(labels={"team": "b"})),
        ({"tenants": ["acme"]}, auto(tenant="acme"), auto()),
        ({"contains": [r"^a+$", r"(?i)\bsum\b"]}, auto("a Sum"), auto("summer")),
        ({"contains": ["ß"]}, auto("x", last_turn="Größe"), auto("Größe", last_turn="x")),
        ({"contains": ["b"]}, auto("a" * 16_383 + "b"), auto("a" * 16_384 + "b")),
        ({"languages": ["de"]}, auto("das ist nicht gut"), auto("this is not good")),
        ({"code": True}, auto("```\nx\n```"), auto("x")),
        ({"code": False}, auto("x"), auto("import os\nimport re\nimport io")),
        ({"findings": ["pii.*"]}, auto(findings=frozenset({"pii.iban"})), auto()),
        (
            {"findings": ["pii.iban"]},
            auto(findings=frozenset({"pii.iban"})),
            auto(findings=frozenset({"pii.email"})),
        ),
    ],
)
def test_conditions(condition: dict[str, Any], fits: Features, fails: Features) -> None:
    settings = {"rules": [{"model": "large", "reason": "r", **condition}]}
    assert plan(settings, fits).model == "large"
    assert plan(settings, fails).model == "small"


@pytest.mark.parametrize("pattern", ["(", "(?<=a)b", r"(a)\1", "a{2000}"])
@pytest.mark.parametrize("policy", ["", "legal"])
def test_a_pattern_that_re2_refuses_is_named(pattern: str, policy: str) -> None:
    rules = [{"model": "large", "reason": "r", "contains": ["fine", pattern]}]
    settings = {"policies": {policy: {"rules": rules}}} if policy else {"rules": rules}
    key = rf"^routing\.{'policies.legal.' if policy else ''}rules\.0\.contains\.1: .*RE2$"
    with pytest.raises(SettingsError, match=key):
        check_patterns(RoutingSettings.model_validate(settings))


def test_tokens_are_counted_only_where_a_rule_asks() -> None:
    rule = {"model": "large", "min_prompt_tokens": 1, "reason": "r"}
    deep = RoutingSettings.model_validate({"policies": {"p": {"rules": [rule]}}})
    assert Router(deep, MODELS).needs_prompt_tokens
    assert not Router(RoutingSettings(), MODELS).needs_prompt_tokens


def test_the_learned_router_ranks_both_models_and_is_named() -> None:
    found = plan({"learned": LEARNED}, auto("a long prompt"))
    assert (found.model, found.strategy_word) == ("large", "learned")
    assert [(one.model, one.quality) for one in found.record().candidates] == [
        ("large", 0.75),
        ("small", 0.5),
    ]
    assert found.versions == {"routing": "v1", "router": "r1"}
    assert plan({"learned": LEARNED}, auto("short")).model == "small"


def test_canaries_get_their_share() -> None:
    settings = {
        "default": "large",
        "canaries": [{"model": "next", "of": "large", "share": 0.2}],
    }
    plans = [plan(settings, auto(key=f"req-{number}")) for number in range(3000)]
    canaries = [one for one in plans if one.model == "next"]
    assert 0.17 < len(canaries) / 3000 < 0.23
    assert all(one.strategy_word == "canary" and "20%" in one.reason for one in canaries)
    assert plan(settings, auto(key="req-7")) == plans[7]


def test_shadows_are_drawn_independently_of_canaries() -> None:
    trial = Trial(model="next", of="large", share=0.5)
    keys = [f"req-{number}" for number in range(2000)]
    canary = {key for key in keys if drawn([trial], "large", key)}
    shadow = {key for key in keys if drawn([trial], "large", key, SHADOW)}
    assert 900 < len(shadow) < 1100
    assert 400 < len(canary & shadow) < 600
    assert not drawn([trial], "small", keys[0], SHADOW)


def test_a_cascade_begins_where_its_first_model_would_answer() -> None:
    settings = {"learned": LEARNED, "cascade": CASCADE}
    found = plan(settings, auto("short"))
    assert (found.model, found.strategy_word) == ("small", "cascade")
    assert found.cascade is not None
    assert found.cascade.second == "large"
    assert [one.model for one in found.record().candidates] == ["small", "large"]
    assert found.record().candidates[1].quality == 0.75
    assert plan(settings, auto("a long prompt")).cascade is None


def test_candidates_carry_cost_and_wait() -> None:
    features = auto("x" * 400, answer_tokens=50)
    (found,) = plan({}, features, {"small": 0.25}, {}).record().candidates
    assert found.cost == pytest.approx((100 * 1 + 50 * 2) / 1e6)
    assert ms_of(found.expected_wait) == 250


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("one 1", 1), ("1, 2 and 3", 3), ("3,4,5", 3), ("1,250.50 EUR", 1), ("A-17 x", 1)],
)
def test_numbers_are_counted(text: str, count: int) -> None:
    assert auto(text).numbers == count


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the best way to do this?", "en"),
        ("Wie ist das Wetter heute und was soll ich tun?", "de"),
        ("Quelle est la meilleure solution pour les enfants ?", "fr"),
        ("Привет, как дела?", "ru"),
        ("Привіт, як справи?", "uk"),
        ("Gdzie jest moje zamówienie?", "pl"),
        ("Summarize this ticket", "en"),
        ("これは日本語の文章です", "ja"),
        ("这是一个中文句子", "zh"),
        ("안녕하세요", "ko"),
        ("12 + 13 =", ""),
        ("Hello", ""),
    ],
)
def test_languages(text: str, language: str) -> None:
    assert auto(text).language == language


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f(x):\n    return self.x[0];\n", True),
        ("SELECT a\nFROM b;\nUPDATE c", True),
        ("Please write to Anna; she knows.", False),
        ("", False),
    ],
)
def test_code(text: str, code: bool) -> None:
    assert auto(text).has_code is code
