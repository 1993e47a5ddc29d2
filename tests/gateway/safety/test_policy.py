"""Policies from the file: what each says, which request gets it, and mistakes that name their key."""

import json

import pytest

from gateway.safety.findings import Action, Choice, Severity
from gateway.safety.inspector import Inspector
from gateway.safety.policy import SafetyPolicy
from sluice.errors import SettingsError
from tests.gateway.safety.written import load_policies

FILE = """\
safety:
  default: standard
  policies:
    standard:
      actions: {pii.*: redact, injection.*: {route: governed}}
      severity: {critical: block}
      deny: [deny.txt]
      output: {actions: {pii.ipv4: flag, output.ansi: remove}}
    strict:
      severity: {low: block}
  choose:
    - {tenant: acme, policy: strict}
    - {labels: {team: lab, kind: test}, policy: strict}
"""
LISTS = {"deny.txt": "# words\nzebra\n\n  blue heron \n", "long.txt": "x" * 300}


def policy_of(body: str) -> SafetyPolicy:
    text = f"safety: {{policies: {{default: {body}}}}}"
    return load_policies(text, LISTS.__getitem__).by_name["default"]


def test_without_a_section_everything_is_flagged() -> None:
    policy = load_policies("").by_name["default"]
    assert policy.actions.choose("secret.jwt", Severity.CRITICAL) == Choice(Action.FLAG)
    assert policy.actions.choose("limit.length", Severity.CRITICAL) == Choice(Action.BLOCK)


def test_the_first_rule_that_holds_chooses() -> None:
    inspector = Inspector(load_policies(FILE, LISTS.__getitem__))
    assert inspector.choose("acme", {}).name == "strict"
    assert inspector.choose("x", {"team": "lab", "kind": "test"}).name == "strict"
    standard = inspector.choose("x", {"team": "lab"})
    assert (standard.name, standard.deny) == ("standard", ("zebra", "blue heron"))


def test_the_version_follows_all_that_decides() -> None:
    texts = (FILE, FILE, FILE.replace("ansi: remove", "ansi: block"))
    versions = [
        load_policies(text, LISTS.__getitem__).by_name["standard"].version for text in texts
    ]
    versions.append(load_policies(FILE, lambda path: "zebra").by_name["standard"].version)
    assert versions[0] == versions[1]
    assert len(set(versions)) == 3
    assert versions[0].startswith("standard@")


ON_ANSWERS = [
    ("{actions: {injection.*: {route: governed}}}", "injection.role_play", Action.FLAG),
    ("{actions: {pii.*: redact}, output: {actions: {pii.ipv4: flag}}}", "pii.ipv4", Action.FLAG),
    ("{actions: {pii.*: redact}, output: {actions: {pii.ipv4: flag}}}", "pii.iban", Action.REDACT),
    # Secrets are redacted unless the policy has an action for them.
    ("{}", "secret.jwt", Action.REDACT),
    ("{actions: {pii.*: flag}}", "secret.jwt", Action.REDACT),
    ("{severity: {low: allow}}", "secret.jwt", Action.REDACT),
    ("{severity: {low: block}}", "secret.jwt", Action.BLOCK),
    ("{actions: {secret.*: block}}", "secret.jwt", Action.BLOCK),
    ("{actions: {secret.jwt: flag}}", "secret.jwt", Action.FLAG),
    ("{severity: {critical: remove}}", "secret.jwt", Action.REMOVE),
    ("{output: {actions: {secret.*: flag}}}", "secret.jwt", Action.FLAG),
    # Rules for answers only are switched on by name.
    ("{}", "output.canary", Action.BLOCK),
    ("{}", "output.ansi", Action.ALLOW),
    ("{output: {actions: {output.ansi: remove}}}", "output.ansi", Action.REMOVE),
    ("{output: {actions: {output.*: block}}}", "output.ansi", Action.BLOCK),
]


@pytest.mark.parametrize(("body", "rule", "action"), ON_ANSWERS)
def test_actions_on_answers(body: str, rule: str, action: Action) -> None:
    table = policy_of(body).output_actions
    assert table.choose(rule, Severity.CRITICAL).action is action


def test_phone_regions_say_which_national_numbers_count() -> None:
    swiss, british = "044 668 18 00", "020 7946 0123"
    named = policy_of("{phone_regions: [CH]}").rules
    assert [one.rule for one in policy_of("{}").rules.scan(british)] == ["pii.phone_national"]
    assert [one.rule for one in named.scan(swiss)] == ["pii.phone_national"]
    assert not named.scan(british)


GUARD = "model: small, template: llama_guard"
CUSTOM = "model: small, template: custom, prompt: '{prompt}', unsafe: a, safe: b"
MISTAKES = {
    "{policies: {default: {restore: maybe}}}": ".restore: 'maybe' should be a valid boolean",
    "{policies: {default: {actions: {pii.*: redct}}}}": ".actions.pii.*: must be one of allow",
    "{policies: {default: {actions: {PII: flag}}}}": ".actions.PII: 'PII' should match",
    "{policies: {default: {actions: {pii.nothing: flag}}}}": "no rule 'pii.nothing'",
    "{policies: {default: {actions: {none.*: flag}}}}": "actions.none.*: no rule 'none.*'",
    "{policies: {default: {actions: {pii.*: {route: nobody}}}}}": "no model 'nobody'; known: small",
    "{policies: {default: {actions: {limit.length: flag}}}}": "actions.limit.length: must block",
    "{policies: {default: {actions: {unicode.*: redact}}}}": "unicode.*: normalization has edited",
    "{policies: {default: {actions: {output.ansi: remove}}}}": "only answers have this rule",
    "{policies: {default: {severity: {huge: block}}}}": "safety.policies.default.severity.huge",
    "{policies: {default: {phone_regions: [XX]}}}": "no region 'XX'; name one of ISO 3166",
    "{policies: {default: {deny: [gone.txt]}}}": "default.deny.0: gone.txt: cannot be read",
    "{policies: {default: {allow: [long.txt]}}}": "long.txt: an entry is longer than 256",
    "{policies: {default: {output: {acts: {}}}}}": "default.output.acts: no such key",
    "{policies: {default: {output: {actions: {pii.x: flag}}}}}": "output.actions.pii.x: no rule",
    "{policies: {default: {output: {actions: {pii.*: {route: small}}}}}}": "cannot be routed",
    "{default: nope}": "safety.default: no policy 'nope'; known: default",
    "{dry_run: nope}": "safety.dry_run: no policy 'nope'",
    "{choose: [{tenant: acme, policy: lax}]}": "safety.choose.0.policy: no policy 'lax'",
    "{choose: [{policy: default}]}": "safety.choose.0: needs tenant or labels",
}
GUARD_MISTAKES = {
    "template: llama_guard": ".model: is missing",
    "model: small": ".template: is missing",
    "model: small, template: gpt": ".template: 'gpt' should be 'llama_guard'",
    "model: nobody, template: llama_guard": ".model: no model 'nobody'; known: small",
    "model: small, template: classifier, categories: [BAD]": "small is no classifier",
    "model: small, template: classifier": "template classifier needs categories",
    "model: judge, template: classifier, categories: [EVIL]": "judge has no label 'EVIL'",
    "model: judge, template: llama_guard": "judge is a classifier",
    f"{GUARD}, checks: []": ".checks: [] should have at least 1 item",
    f"{GUARD}, checks: [inputs]": ".checks.0: 'inputs' should be 'input' or 'output'",
    f"{GUARD}, threshold: 2": ".threshold: 2 should be less than",
    f"{GUARD}, action: redact": "must be block, flag, or",
    f"{GUARD}, action: {{route: x}}": "action: no model 'x'",
    f"{GUARD}, action: {{route: small}}, checks: [output]": "an answer cannot be routed",
    f"{GUARD}, fail: maybe": ".fail: 'maybe' should be 'open' or 'closed'",
    f"{GUARD}, budget_s: 0": ".budget_s: 0 should be greater than 0",
    f"{GUARD}, criterion: harm": "criterion: only template shieldgemma",
    "model: small, template: custom, prompt: a": ".prompt: needs the field {prompt}",
    "model: small, template: custom, prompt: '{prompt}'": "template custom needs unsafe",
    CUSTOM.replace("unsafe: a", "unsafe: '('"): "unsafe: the engine refuses the pattern: mis",
    f"{CUSTOM}, checks: [output]": "needs the field {answer}",
    f"{CUSTOM}, threshold: 0.5": "a custom template gives no score",
    "model: judge, template: token_classifier, action: flag": "its findings are rules ner.LABEL",
    "model: judge, template: token_classifier, hold: true": "reads answers in windows",
}
LABELS = {"small": (), "judge": ("GOOD", "BAD")}


def error_of(section: str) -> str:
    def read(path: str) -> str:
        if path not in LISTS:
            raise FileNotFoundError(2, "No such file or directory")
        return LISTS[path]

    with pytest.raises(SettingsError) as caught:
        load_policies(f"safety: {section}", read, LABELS)
    return str(caught.value)


@pytest.mark.parametrize("section", MISTAKES)
def test_a_mistake_is_named_with_its_key(section: str) -> None:
    error = error_of(section)
    assert error.startswith("safety.")
    assert MISTAKES[section] in error


@pytest.mark.parametrize("guard", GUARD_MISTAKES)
def test_a_guard_that_cannot_work_is_named(guard: str) -> None:
    error = error_of(f"{{policies: {{default: {{guard: {{g: {{{guard}}}}}}}}}}}")
    assert error.startswith("safety.policies.default.guard.g")
    assert GUARD_MISTAKES[guard] in error


def test_guards_of_classifiers_load() -> None:
    guards = {
        "a": {"model": "judge", "template": "classifier", "categories": ["BAD"]},
        "b": {"model": "ner", "template": "token_classifier", "checks": ["output"]},
    }
    text = json.dumps({"safety": {"policies": {"default": {"guard": guards}}}})
    labels = {**LABELS, "ner": ("O", "B-PER")}
    policy = load_policies(text, models=labels, token_classifiers=("ner",)).by_name["default"]
    assert [guard.name for guard in policy.guards] == ["a"]
    assert [guard.name for guard in policy.answer_readers] == ["b"]
    assert policy.prompt_readers == ()
