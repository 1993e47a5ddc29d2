"""Policies in the configuration file: presets, what overrides them, and what is refused."""

import math
from pathlib import Path

import pytest

from sluice.settings import Settings, SettingsError, load
from sluice.settings.batching import PRESETS, Policy


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "sluice.yaml"
    path.write_text(text)
    return load(path)


ENCODER = (
    "models: [{name: small, path: x}, {name: guard, path: y, engine: classifier}]\n"
    "routing: {rules: [], fallbacks: {}}\n"
)


def of_guard(policy: str) -> str:
    return f"{ENCODER}batcher: {{policies: {{guard: {policy}}}}}\n"


def test_a_policy_is_a_name_or_a_name_with_what_differs(tmp_path: Path) -> None:
    named = loaded(tmp_path, of_guard("window")).batcher.policy_of("guard")
    assert (named.name, named.wait_s, named.order) == ("window", 0.05, "arrival")
    text = of_guard("{name: window, wait_s: 0.2}")
    changed = loaded(tmp_path, text).batcher.policy_of("guard")
    assert (changed.wait_s, changed.order) == (0.2, "arrival")


def test_without_a_policy_everything_is_on() -> None:
    policy = Settings().batcher.policy
    assert policy == Policy(name="continuous")
    assert policy.order == "fair"
    assert not policy.pads


def test_a_model_may_have_a_policy_of_its_own(tmp_path: Path) -> None:
    batcher = loaded(tmp_path, of_guard("length")).batcher
    assert batcher.policy_of("guard").name == "length"
    assert batcher.policy_of("small").name == "continuous"


def test_a_class_that_is_named_keeps_what_is_not_said_of_it(tmp_path: Path) -> None:
    text = "batcher: {policy: {classes: {bulk: {aging_s: 3}}}}"
    bulk = loaded(tmp_path, text).batcher.policy.of_class("bulk")
    assert (bulk.aging_s, bulk.spare_rows) == (3.0, 8)


def test_tenants_have_weights(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "tenants: {gold: {weight: 2.5}, plain: {}}")
    assert settings.weights == {"gold": 2.5, "plain": 1.0}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_goes_through_the_file_and_back(name: str, tmp_path: Path) -> None:
    settings = loaded(tmp_path, of_guard(name))
    assert loaded(tmp_path, settings.to_yaml()) == settings


def test_an_environment_variable_changes_a_single_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_BATCHER__POLICY__NAME", "continuous")
    monkeypatch.setenv("SLUICE_BATCHER__POLICY__MAX_ROWS", "7")
    policy = load().batcher.policy
    assert (policy.name, policy.max_rows) == ("continuous", 7)


SMALL = "models: [{name: small, path: x, engine: embedding, context_tokens: 512}]\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("batcher: {policy: fastest}", "batcher.policy.name"),
        ("batcher: {policy: {max_rows: 0}}", "batcher.policy.max_rows"),
        ("batcher: {policy: {padding_max: 1.5}}", "batcher.policy.padding_max"),
        ("batcher: {policy: {bucket_ratio: 1}}", "batcher.policy.bucket_ratio"),
        ("batcher: {policy: {rows: 3}}", "batcher.policy.rows"),
        ("batcher: {policy: {name: window, wait_s: 20}}", "batcher.policy.wait_s"),
        ("batcher: {policy: {classes: {urgent: {}}}}", "batcher.policy.classes.urgent"),
        ("batcher: {policy: {classes: {bulk: {aging_s: 0}}}}", "classes.bulk.aging_s"),
        ("batcher: {policy: {classes: {bulk: 3}}}", "batcher.policy.classes.bulk"),
        ("batcher: {policies: {huge: fixed}}", "batcher.policies.huge"),
        ("batcher: {policy: fixed}", "batcher.policy: 'fixed' is for engines that compute a batch"),
        ("batcher: {policies: {small: length}}", "batcher.policies.small: 'length' is for"),
        ("batcher: {policy: {wait_s: 0.1}}", "wait_s: makes no difference to"),
        ("batcher: {policy: {by_tenant: false}}", "`order: class`"),
        ("batcher: {policy: {aging_rows: 3}}", "shorten its `aging_s`"),
        ("tenants: {gold: {weight: -1}}", "tenants.gold.weight"),
        ("tenants: {gold: {weight: 0}}", "tenants.gold.weight"),
        (
            SMALL + "batcher: {policy: {name: length, batch_tokens_max: 511}}",
            "batcher.policy.batch_tokens_max",
        ),
        (
            SMALL + "batcher: {policies: {small: {name: length, batch_tokens_max: 5}}}",
            "batcher.policies.small.batch_tokens_max",
        ),
    ],
)
def test_what_cannot_work_is_refused_and_the_key_is_named(
    text: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as refused:
        loaded(tmp_path, text)
    assert key in str(refused.value)


def test_a_budget_that_one_prompt_fits_is_taken(tmp_path: Path) -> None:
    settings = loaded(tmp_path, SMALL + "batcher: {policy: {name: length, batch_tokens_max: 512}}")
    assert settings.batcher.policy.batch_tokens_max == 512
    assert Policy().batch_tokens_max == math.inf
