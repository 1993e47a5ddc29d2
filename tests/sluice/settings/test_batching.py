"""Policies in the configuration file: presets, what overrides them, and what is refused."""

import math
from pathlib import Path

import pytest

from sluice.settings import Settings, SettingsError, load
from sluice.settings.batching import PRESETS, Policy, policy_notes


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


def policy_of(settings: Settings, name: str) -> Policy:
    model = settings.model(name)
    assert model is not None
    return settings.policy_of(model)


def test_policy_is_a_name_or_a_name_with_overrides(tmp_path: Path) -> None:
    named = policy_of(loaded(tmp_path, of_guard("window")), "guard")
    assert (named.name, named.wait_s) == ("window", 0.05)
    changed = policy_of(loaded(tmp_path, of_guard("{name: window, wait_s: 0.2}")), "guard")
    assert (changed.wait_s, changed.sends_to_idle) == (0.2, False)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_leave_the_order_alone(name: str) -> None:
    policy, order = Policy(name=name), ("order",)
    assert {getattr(policy, key) for key in order} == {getattr(Policy(), key) for key in order}
    assert Policy.model_validate({"name": name, "order": "arrival"}).order == "arrival"


def test_unset_policy_is_the_default_of_the_engine(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "batcher: {policy: {max_rows: 7}}")
    (model, *_) = settings.models
    assert settings.policy_of(model) == Policy(name="continuous", max_rows=7)
    whole = model.model_copy(update={"engine": "generate"})
    policy = settings.policy_of(whole)
    assert (policy.name, policy.max_rows, policy.padding_max) == ("length", 7, 0.3)
    again = loaded(tmp_path, settings.to_yaml())
    assert again.policy_of(whole) == policy
    named = loaded(tmp_path, "batcher: {policy: window}")
    assert named.policy_of(whole).name == "window"
    own = loaded(tmp_path, "batcher: {policy: {padding_max: 0.1}}").policy_of(whole)
    assert (own.name, own.padding_max) == ("length", 0.1)


def test_a_model_may_have_a_policy_of_its_own(tmp_path: Path) -> None:
    settings = loaded(tmp_path, of_guard("length"))
    assert policy_of(settings, "guard").name == "length"
    assert policy_of(settings, "small").name == "continuous"


@pytest.mark.parametrize("name", PRESETS)
def test_every_policy_serves_every_engine(name: str, tmp_path: Path) -> None:
    text = ENCODER + f"batcher: {{policy: {name}, policies: {{small: {name}}}}}\n"
    settings = loaded(tmp_path, text)
    assert {settings.policy_of(model).name for model in settings.models} == {name}


@pytest.mark.parametrize(
    ("values", "streams", "note"),
    [
        ("length", True, "policy length for model small: no gain, engine e pads nothing"),
        ("fixed", True, "policy fixed for model small: no gain, engine e admits requests at"),
        ("length", False, None),
        ("continuous", True, None),
        ({"wait_s": 1}, True, "policy continuous for model small: no effect of wait_s, it has"),
        ({"classes": {"bulk": {"wait_s": 1}}}, False, "no effect of classes.bulk.wait_s"),
    ],
)
def test_policy_notes_name_what_gains_nothing(
    values: object, streams: bool, note: str | None
) -> None:
    notes = policy_notes(Policy.model_validate(values), "small", "e", streams=streams)
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


def test_classes_have_windows_of_their_own(tmp_path: Path) -> None:
    text = "batcher: {policy: {name: window, wait_s: 0.2, classes: {bulk: {wait_s: 60}}}}"
    policy = policy_of(loaded(tmp_path, text), "small")
    windows = [policy.window_s(name) for name in ("interactive", "standard", "bulk")]
    assert windows == [0.2, 0.2, 60]
    assert policy.of_class("bulk").aging_s == 10, "what is not said stays"
    assert Policy(wait_s=3).window_s("bulk") == 0


def test_a_class_that_is_named_keeps_what_is_not_said_of_it(tmp_path: Path) -> None:
    text = "batcher: {policy: {classes: {bulk: {aging_s: 3}}}}"
    bulk = loaded(tmp_path, text).batcher.policy.of_class("bulk")
    assert bulk.aging_s == 3.0


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
        ("batcher: {policy: {rows: 3}}", "batcher.policy.rows"),
        ("batcher: {policy: {name: window, wait_s: 20}}", "batcher.policy.wait_s"),
        ("batcher: {policy: {classes: {urgent: {}}}}", "batcher.policy.classes.urgent"),
        ("batcher: {policy: {classes: {bulk: {aging_s: 0}}}}", "classes.bulk.aging_s"),
        ("batcher: {policy: {classes: {bulk: 3}}}", "batcher.policy.classes.bulk"),
        ("batcher: {policies: {huge: fixed}}", "batcher.policies.huge"),
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
