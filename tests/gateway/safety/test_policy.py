"""Policies from the file: errors name the key, versions follow the content."""

import pytest

from gateway.safety.actions import Action, Choice
from gateway.safety.compiled import CompiledPolicies, CompiledPolicy, compile_policies
from gateway.safety.findings import Severity
from gateway.safety.inspector import Inspector
from gateway.safety.policy import SafetyPolicies
from gateway.safety.rules.ruleset import RuleSet
from sluice.errors import SettingsError
from tests.gateway.safety.written import load_policies

FILE = """\
models: []
safety:
  default: standard
  policies:
    standard:
      actions:
        pii.*: redact
        injection.*: {route: governed}
      severity: {critical: block}
      restore: true
      deny: [deny.txt]
      output:
        actions: {pii.ip: flag, output.ansi: remove}
    strict:
      severity: {low: block}
  choose:
    - {tenant: acme, policy: strict}
    - {labels: {team: lab, kind: test}, policy: strict}
  dry_run: strict
"""
LISTS = {"deny.txt": "# words\nzebra\n\n  blue heron \n"}


def load(text: str = FILE, **known: list[str]) -> SafetyPolicies:
    return load_policies(text, LISTS.__getitem__, **known)


def test_a_file_without_the_section_flags_everything() -> None:
    policy = load("models: []\n").by_name["default"]
    assert policy.actions.choose("pii.email", Severity.CRITICAL) == Choice(Action.FLAG)
    assert not policy.settings.restore
    assert load("").settings.default == "default"


def test_actions_for_prompts_and_answers() -> None:
    policy = load().by_name["standard"]
    assert policy.actions.choose("injection.x", Severity.LOW) == Choice(Action.ROUTE, "governed")
    assert policy.output_actions.choose("injection.x", Severity.LOW) == Choice(Action.FLAG)
    assert policy.output_actions.choose("pii.ip", Severity.LOW).action is Action.FLAG
    assert policy.output_actions.choose("pii.email", Severity.LOW).action is Action.REDACT
    assert policy.output_actions.choose("output.ansi", Severity.LOW).action is Action.REMOVE
    assert policy.output_actions.choose("output.canary", Severity.LOW).action is Action.BLOCK
    assert policy.deny == ("zebra", "blue heron")


def test_the_first_rule_that_holds_chooses() -> None:
    policies = load()
    rules = RuleSet(())
    by_name = {name: CompiledPolicy(policy, rules) for name, policy in policies.by_name.items()}
    inspector = Inspector(CompiledPolicies(policies.settings, by_name, None))
    assert inspector.choose("acme", {}).policy.name == "strict"
    assert inspector.choose("x", {"team": "lab", "kind": "test"}).policy.name == "strict"
    assert inspector.choose("x", {"team": "lab"}).policy.name == "standard"


def test_the_version_follows_all_that_decides() -> None:
    first = load().by_name["standard"].version
    assert first.startswith("standard@")
    assert load().by_name["standard"].version == first
    assert (
        load(FILE.replace("output.ansi: remove", "output.ansi: block")).by_name["standard"].version
        != first
    )
    changed = load_policies(FILE, lambda path: "zebra")
    assert changed.by_name["standard"].version != first


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pii.*: redact", "pii.*: redct", r"safety.policies.standard.actions.pii.\*: must be one of"),
        ("pii.*", "PII", "safety.policies.standard.actions.PII: 'PII' does not match"),
        ("actions: {pii.ip", "acts: {pii.ip", "safety.policies.standard.output.acts: no such key"),
        ("pii.ip: flag", "pii.ip: {route: a}", ".*output.actions.*cannot be routed"),
        ("critical:", "huge:", "safety.policies.standard.severity.huge"),
        ("default: standard", "default: nope", "safety.default: no policy 'nope'"),
        ("policy: strict}\n    -", "policy: lax}\n    -", "safety.choose.0.policy: no policy 'lax'"),
        ("tenant: acme, ", "", "safety.choose.0: needs tenant or labels"),
        ("dry_run: strict", "dry_run: no", "safety.dry_run"),
        ("deny.txt", "gone.txt", r"safety.policies.standard.deny.0: gone.txt: cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_key(old: str, new: str, message: str) -> None:
    assert old in FILE

    def read(path: str) -> str:
        if path not in LISTS:
            raise FileNotFoundError(2, "No such file or directory")
        return LISTS[path]

    with pytest.raises(SettingsError, match=message):
        load_policies(FILE.replace(old, new, 1), read)


def test_unknown_rules_and_models_are_refused_when_all_are_known() -> None:
    rules = ["pii.ip", "injection.role"]
    load(known_rules=rules, known_models={"governed": ()})
    with pytest.raises(SettingsError, match=r".*no rule 'pii\.\*'"):
        load(known_rules=["injection.role"])
    with pytest.raises(SettingsError, match=r".*no model 'governed'"):
        load(known_models={"small": ()})


@pytest.mark.parametrize(
    ("body", "action"),
    [
        ("{}", Action.REDACT),
        ("{actions: {pii.*: flag}}", Action.REDACT),
        ("{severity: {low: allow}}", Action.REDACT),
        ("{severity: {low: block}}", Action.BLOCK),
        ("{actions: {secret.*: block}}", Action.BLOCK),
        ("{actions: {secret.jwt: flag}}", Action.FLAG),
        ("{severity: {critical: remove}}", Action.REMOVE),
        ("{output: {actions: {secret.*: flag}}}", Action.FLAG),
    ],
)
def test_answers_redact_secrets_by_default(body: str, action: Action) -> None:
    policy = load(f"safety: {{policies: {{default: {body}}}}}").by_name["default"]
    assert policy.output_actions.choose("secret.jwt", Severity.CRITICAL).action is action


@pytest.mark.parametrize(
    ("actions", "action"),
    [
        ("{}", Action.ALLOW),
        ("{output.ansi: remove}", Action.REMOVE),
        ("{output.*: block}", Action.BLOCK),
    ],
)
def test_answer_rules_are_switched_on_by_name(actions: str, action: Action) -> None:
    text = f"safety: {{policies: {{default: {{output: {{actions: {actions}}}}}}}}}"
    policy = load(text).by_name["default"]
    assert policy.output_actions.choose("output.ansi", Severity.MEDIUM).action is action


def test_the_name_of_a_policy_says_nothing_about_its_actions() -> None:
    with pytest.raises(SettingsError, match="only answers have this rule"):
        load("safety: {policies: {default: {actions: {output.ansi: remove}}}}")
    with pytest.raises(SettingsError, match="must block"):
        load("safety: {default: output, policies: {output: {actions: {limit.length: flag}}}}")


def test_phone_regions_say_which_national_numbers_count() -> None:
    text = "safety: {policies: {default: {phone_regions: [CH]}, all: {}}}"
    compiled = compile_policies(load(text)).by_name
    swiss, british = "044 668 18 00", "020 7946 0123"
    assert [one.rule for one in compiled["all"].rules.scan(british)] == ["pii.phone_national"]
    assert [one.rule for one in compiled["default"].rules.scan(swiss)] == ["pii.phone_national"]
    assert not compiled["default"].rules.scan(british)
    with pytest.raises(SettingsError, match="no region 'XX'; name one of ISO 3166"):
        load("safety: {policies: {default: {phone_regions: [XX]}}}")
