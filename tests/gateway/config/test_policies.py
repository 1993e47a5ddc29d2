"""Policies of a configuration: the example of the page works, what cannot work is refused with its key."""

import json
import re
from pathlib import Path

import pytest

from gateway.config.policies import load_policies_of, read_policies
from gateway.safety.actions import Action
from gateway.safety.compiled import rule_names
from gateway.safety.findings import Severity
from gateway.safety.inspector import Inspector
from sluice import settings as configuration
from sluice.settings import Settings, SettingsError

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "safety.md"


def load(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "sluice.yaml"
    path.write_text(text, encoding="utf-8")
    return configuration.load(path)


def test_without_a_section_everything_is_flagged() -> None:
    policy = read_policies(Settings()).by_name["default"]
    assert policy.actions.choose("secret.assignment", Severity.CRITICAL).action is Action.FLAG
    assert policy.actions.choose("limit.length", Severity.CRITICAL).action is Action.BLOCK


def test_the_example_of_the_page_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, example = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "codenames.txt").write_text("blue heron\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    policies = read_policies(load(tmp_path, example))
    assert set(policies.by_name) == {"default", "strict"}
    (rule,) = policies.settings.choose
    assert rule.holds("default", {"team": "finance"})
    assert policies.by_name[rule.policy].deny == ("blue heron",)


def test_the_page_names_every_family_and_rule_of_ours() -> None:
    page = PAGE.read_text(encoding="utf-8")
    plain = {name for name in rule_names() if ".encoded." not in name}
    assert [name for name in sorted(plain) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("restore: maybe", "safety.policies.default.restore: 'maybe' is neither true nor false"),
        (
            "output: {actions: {output.ansi: sometimes}}",
            "safety.policies.default.output.actions.output.ansi: must be one of allow",
        ),
        ("output: {actions: {pii.*: {route: large}}}", "pii.*: an answer cannot be routed"),
        ("actions: {limit.length: flag}", "actions.limit.length: must block"),
        ("actions: {unicode.*: redact}", "actions.unicode.*: normalization has edited"),
        ("actions: {pii.nothing: flag}", "no rule 'pii.nothing'"),
        ("actions: {pii.*: {route: nobody}}", "no model 'nobody'; known: small, large"),
        ("deny: [missing.txt]", "missing.txt: cannot be read"),
        ("output: {languages: [en]}", "output.languages: no such key"),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(tmp_path: Path, body: str, says: str) -> None:
    text = f"safety:\n  policies:\n    default:\n      {body}\n"
    with pytest.raises(SettingsError) as caught:
        read_policies(load(tmp_path, text))
    assert says in str(caught.value)
    assert str(caught.value).startswith("safety.")


DEFAULTS = {"model": "small", "template": "llama_guard"}


def of_guard(guard: str) -> str:
    return f"safety:\n  policies:\n    default:\n      guard:\n        g: {{{guard}}}\n"


CUSTOM = "template: custom, prompt: '{prompt}', unsafe: a, safe: b"


@pytest.mark.parametrize(
    ("guard", "says"),
    [
        ("template: gpt", "guard.g.template: 'gpt' is not one of llama_guard"),
        ("model: nobody", "guard.g.model: no model 'nobody'; known: small"),
        ("template: classifier, categories: [BAD]", "small is no classifier"),
        ("template: classifier", "template classifier needs categories"),
        ("checks: []", "guard.g.checks: has too few entries; name at least 1"),
        ("checks: [inputs]", "guard.g.checks.0: 'inputs' is not one of"),
        ("threshold: 2", "guard.g.threshold: 2 is too large"),
        ("action: redact", "must be block, flag, or"),
        ("action: {route: x}", "action: no model 'x'"),
        ("action: {route: small}, checks: [output]", "an answer cannot be routed"),
        ("fail: maybe", "guard.g.fail: 'maybe' is not one of"),
        ("budget_s: 0", "guard.g.budget_s: 0 is too small"),
        ("criterion: harm", "criterion: only template shieldgemma"),
        ("template: custom, prompt: a", "guard.g.prompt: needs the field {prompt}"),
        ("template: custom, prompt: '{prompt}'", "template custom needs unsafe"),
        (CUSTOM.replace("unsafe: a", "unsafe: '('"), "unsafe: the engine refuses the pattern: mis"),
        (f"{CUSTOM}, checks: [output]", "needs the field {answer}"),
        (f"{CUSTOM}, threshold: 0.5", "a custom template gives no score"),
    ],
)
def test_a_guard_that_cannot_work_is_refused_with_its_place(
    tmp_path: Path, guard: str, says: str
) -> None:
    given = {key: f"{key}: {value}" for key, value in DEFAULTS.items() if f"{key}:" not in guard}
    with pytest.raises(SettingsError) as caught:
        read_policies(load(tmp_path, of_guard(", ".join([*given.values(), guard]))))
    assert says in str(caught.value)
    assert str(caught.value).startswith("safety.policies.default.guard.g")


@pytest.mark.parametrize("key", ["model", "template"])
def test_a_guard_names_its_model_and_template(tmp_path: Path, key: str) -> None:
    guard = ", ".join(f"{name}: {value}" for name, value in DEFAULTS.items() if name != key)
    with pytest.raises(SettingsError, match=rf"guard\.g\.{key}: is missing"):
        read_policies(load(tmp_path, of_guard(guard)))


def classifier(folder: Path, config: dict[str, object]) -> dict[str, str]:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config))
    return {"name": "judge", "path": str(folder), "engine": "classifier"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "config.json has no labels; name them in id2label"),
        ({"id2label": {"0": "BAD"}}, "has no labels"),
        ({"id2label": {"1": "BAD", "2": "GOOD"}}, "numbers its labels otherwise"),
        ({"id2label": {"0": "BAD", "1": "BAD"}}, "numbers its labels otherwise"),
    ],
)
def test_a_classifier_without_labels_is_refused(
    tmp_path: Path, config: dict[str, object], says: str
) -> None:
    models = [classifier(tmp_path / "judge", config), {"name": "small", "path": "builtin:small"}]
    text = json.dumps({"models": models, "routing": {"default": "small"}})
    with pytest.raises(SettingsError) as caught:
        read_policies(load(tmp_path, text))
    assert says in str(caught.value)


def test_the_labels_of_a_classifier_are_known(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "judge", {"id2label": {"0": "GOOD", "1": "BAD"}})
    models = json.dumps([folder, {"name": "small", "path": "builtin:small"}])
    head = f"models: {models}\nrouting: {{default: small}}\n"
    good = of_guard("model: judge, template: classifier, categories: [BAD]")
    assert read_policies(load(tmp_path, head + good)).by_name["default"].settings.guard
    for guard, says in (
        ("model: judge, template: classifier, categories: [EVIL]", "judge has no label 'EVIL'"),
        ("model: judge, template: llama_guard", "judge is a classifier"),
    ):
        with pytest.raises(SettingsError, match=says):
            read_policies(load(tmp_path, head + of_guard(guard)))
    with pytest.raises(SettingsError, match="'judge' has engine classifier and answers no prompts"):
        load(tmp_path, f"models: {models}\nrouting: {{default: judge}}\n")


def test_a_dry_run_of_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"safety\.dry_run: no policy 'next'"):
        read_policies(load(tmp_path, "safety: {dry_run: next}"))


def test_an_entry_that_is_too_long_is_refused(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("x" * 300, encoding="utf-8")
    text = f"safety: {{policies: {{default: {{deny: ['{words}']}}}}}}"
    with pytest.raises(
        SettingsError, match=r"default\.deny\.0: .*words\.txt: an entry is longer than 256"
    ):
        read_policies(load(tmp_path, text))


def test_the_environment_has_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SAFETY__DEFAULT", "nope")
    with pytest.raises(SettingsError, match="no policy 'nope'"):
        read_policies(load(tmp_path, "safety: {default: default}"))


def test_labels_choose_the_policy(tmp_path: Path) -> None:
    text = "safety: {policies: {default: {}, b: {severity: {low: block}}}, choose: [{labels: {k: v}, policy: b}]}"
    inspector = Inspector(load_policies_of(load(tmp_path, text)))
    assert inspector.choose("default", {"k": "v"}).policy.name == "b"
    assert inspector.choose("default", {}).policy.name == "default"


def test_only_the_folders_of_classifiers_are_looked_at() -> None:
    """A model whose folder is missing is refused by who loads it, with its name."""
    echo = {"name": "echo", "engine": "echo", "path": "/nowhere"}
    settings = Settings.model_validate({"models": [echo], "routing": {"default": "echo"}})
    assert read_policies(settings).by_name
    guard = echo | {"engine": "classifier"}
    settings = Settings.model_validate(
        {"models": [echo, guard | {"name": "guard"}]} | {"routing": {"default": "echo"}}
    )
    with pytest.raises(SettingsError, match="/nowhere"):
        read_policies(settings)
