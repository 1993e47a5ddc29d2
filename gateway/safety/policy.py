"""Policies of the YAML section `safety:`, which action for which rule, by tenant and label.

    safety:
      default: standard
      policies:
        standard:
          actions: {"pii.*": redact, "secret.*": block, "injection.*": {route: governed}}
          severity: {critical: block, medium: flag}
          restore: true
          output: {actions: {output.ansi: remove}, canaries: ["zebra-7781"]}
          guard: {harm: {model: llama-guard, template: llama_guard, checks: [input, output]}}
      choose:
        - {tenant: acme, policy: strict}
      dry_run: next

`SafetyPolicies` never change once they are loaded. A request keeps the policy that it began with.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pydantic import ValidationError

from gateway.safety.actions import Action, ActionTable, Choice
from gateway.safety.findings import Severity
from gateway.safety.guards.entities import entities_of, rule_of
from gateway.safety.output.automaton import Automaton, watched_rules
from gateway.safety.patterns import PatternError, longest_match
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import Form, RuleSpec
from gateway.safety.settings import GuardSettings, PolicySettings, RuleSettings, SafetySettings
from gateway.safety.text.normalize import normalize
from sluice.errors import SettingsError
from sluice.settings import problems

SECTION: Final = "safety"
NORMALIZED: Final = ("unicode.", "syntax.")
"""Prefixes of the rules of normalization."""
ANSWER_RULES: Final = {
    "output.canary": Choice(Action.BLOCK),
    "output.markdown_image": Choice(Action.ALLOW),
    "output.ansi": Choice(Action.ALLOW),
    "output.system_echo": Choice(Action.ALLOW),
}
"""Rules for answers only, with their actions unless a policy names them under `output.actions`."""


ENTRY_CHARS_MAX: Final = 256
"""Longest word or phrase of a list, in characters."""
KeyPath = tuple[str | int, ...]
"""Keys and item numbers from the section down to a value."""
Problem = tuple[KeyPath, str]
"""A key, and what is wrong with its value."""

_SECRETS: Final = "secret.*"
"""Redacted in answers unless the policy sets an action: a leak must be allowed explicitly."""
_ALWAYS: Final = {rule: Choice(Action.BLOCK) for rule in ("limit.length", "unicode.invisible_only")}
"""Actions unless the policy sets others: text that was not inspected, or is no text, blocks."""


@dataclass(frozen=True)
class SafetyPolicy:
    """One policy as requests carry it.

    Attributes:
        name: its key in the configuration.
        settings: the policy as configured.
        deny: lines of the deny lists.
        allow: lines of the allow lists.
        rules: rules of the operator.
    """

    name: str
    settings: PolicySettings
    deny: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    rules: tuple[RuleSettings, ...] = ()

    @cached_property
    def hash(self) -> str:
        """First 12 hex digits of the SHA-256 over everything that decides, lists and own rules included."""
        rules = [rule.model_dump(mode="json") for rule in self.rules]
        content = [self.settings.model_dump(mode="json"), self.deny, self.allow, *rules]
        plain = json.dumps(content, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:12]

    @cached_property
    def version(self) -> str:
        """Name and hash, such as "standard@0123456789ab"."""
        return f"{self.name}@{self.hash}"

    @cached_property
    def actions(self) -> ActionTable:
        """Actions for prompts."""
        settings = self.settings
        severities = {Severity[name.upper()]: choice for name, choice in settings.severity.items()}
        custom = {rule.id: rule.action for rule in self.rules if rule.action is not None}
        return ActionTable(_ALWAYS | custom | settings.actions, severities)

    @cached_property
    def output_actions(self) -> ActionTable:
        """Actions for answers."""
        prompt_actions, output = self.actions, self.settings.output
        rules = {rule: _unrouted(choice) for rule, choice in prompt_actions.rules.items()}
        severities = {
            level: _unrouted(choice) for level, choice in prompt_actions.severities.items()
        }
        # A policy that says nothing about secrets still redacts them in answers.
        if not prompt_actions.edits(_SECRETS) and not any(
            rule.startswith("secret.") for rule in rules
        ):
            rules[_SECRETS] = Choice(Action.REDACT)
        # A prefix such as `output.*` switches them on as their names do.
        defaults = {} if "output.*" in output.actions else ANSWER_RULES
        return ActionTable(
            rules | defaults | output.actions, severities, _unrouted(prompt_actions.default)
        )


@dataclass(frozen=True)
class SafetyPolicies:
    """All policies of a configuration; the settings say which request gets which.

    Attributes:
        labels: labels of the models that classify, by model name.
    """

    by_name: Mapping[str, SafetyPolicy]
    settings: SafetySettings
    labels: Mapping[str, Sequence[str]]


def load_policies(
    section: Mapping[str, Any],
    read_list: Callable[[str], str],
    known_rules: Collection[str] = (),
    known_models: Mapping[str, Sequence[str]] | None = None,
    token_classifiers: Collection[str] = (),
) -> SafetyPolicies:
    """Check and load the policies of a configuration.

    Args:
        section: settings `safety:`; if empty, everything is flagged and nothing changed.
        read_list: returns the content of a list file by its path.
        known_rules: names of all rules; if empty, names are not checked.
        known_models: labels of all models by name, empty for those that do not classify; None:
            names are not checked.
        token_classifiers: names of the models that classify tokens.

    Raises:
        SettingsError: the message names the key.
    """
    try:
        settings = SafetySettings.model_validate(section, context=known_models)
    except ValidationError as error:
        raise SettingsError("\n".join(problems(error, SafetySettings, SECTION))) from None
    contradictions = _problems(settings, known_rules, known_models, token_classifiers)
    if lines := [str(_error(place, problem)) for place, problem in contradictions]:
        raise SettingsError("\n".join(lines))
    policies = {
        name: SafetyPolicy(
            name,
            body,
            tuple(_list_lines(("policies", name, "deny"), body.deny, read_list)),
            tuple(_list_lines(("policies", name, "allow"), body.allow, read_list)),
            settings.rules,
        )
        for name, body in settings.policies.items()
    }
    return SafetyPolicies(policies, settings, known_models or {})


def _unrouted(choice: Choice) -> Choice:
    return Choice(Action.FLAG) if choice.action is Action.ROUTE else choice


def _problems(
    settings: SafetySettings,
    rules: Collection[str],
    models: Mapping[str, Sequence[str]] | None,
    token_classifiers: Collection[str],
) -> Iterator[Problem]:
    """Yield contradictions between keys that are right by themselves."""
    yield from _name_problems(settings)
    names = [rule.name for rule in settings.rules]
    for index, rule in enumerate(settings.rules):
        if rule.name in names[:index]:
            yield ("rules", index, "name"), f"two rules have the name {rule.name!r}"
        for place, problem in problems_of(rule):
            yield ("rules", index, *place), f"{rule.name}: {problem}"
    yield from _action_problems(settings, rules, models or {})
    for policy, body in settings.policies.items():
        for name, guard in body.guard.items() if models is not None else ():
            for key, problem in _guard_problems(guard, body, models or {}, token_classifiers):
                yield ("policies", policy, "guard", name, key), problem


def _name_problems(settings: SafetySettings) -> Iterator[Problem]:
    places: dict[KeyPath, str | None] = {
        ("default",): settings.default,
        ("dry_run",): settings.dry_run,
    }
    places |= {("choose", i, "policy"): rule.policy for i, rule in enumerate(settings.choose)}
    for place, name in places.items():
        if name is not None and name not in settings.policies:
            yield place, f"no policy {name!r}; known: {', '.join(settings.policies)}"


def _action_problems(
    settings: SafetySettings, rules: Collection[str], models: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Yield unknown rules, and actions that come too late: after normalization or without inspection."""
    custom = (
        *(rule.id for rule in settings.rules),
        *_entity_rules(settings, models),
        *ANSWER_RULES,
    )
    for policy, body in settings.policies.items():
        for keys, actions in (
            (("actions",), body.actions),
            (("output", "actions"), body.output.actions),
        ):
            for rule, choice in actions.items():
                place = ("policies", policy, *keys, rule)
                if rules and not _fits(rule, [*rules, *custom]):
                    yield place, f"no rule {rule!r}"
                # Answers are not normalized and have no limit of length.
                if actions is body.output.actions:
                    continue
                if rule.startswith("output."):
                    yield place, "only answers have this rule; name it under output.actions"
                if rule == "limit.length" and choice.action is not Action.BLOCK:
                    yield place, "must block: longer text is not inspected"
                if rule.startswith(NORMALIZED) and choice.action in (Action.REMOVE, Action.REDACT):
                    yield (
                        place,
                        "normalization has edited the text already; use flag, block or {route: MODEL}",
                    )


def _guard_problems(
    guard: GuardSettings,
    policy: PolicySettings,
    models: Mapping[str, Sequence[str]],
    token_classifiers: Collection[str],
) -> Iterator[tuple[str, str]]:
    if guard.model not in models:
        yield "model", f"no model {guard.model!r}; known: {', '.join(models)}"
        return
    labels = models[guard.model]
    kind = "token_classifier" if guard.model in token_classifiers else "classifier"
    if (guard.template == kind) != bool(labels):
        is_one = f"is a {kind}" if labels else "is no classifier"
        yield "template", f"{guard.model} {is_one}; see engine of models"
    if guard.template == "token_classifier":
        labels = entities_of(labels)
        if "output" in guard.checks and not policy.enabled:
            yield "checks", "output: answers of this policy are not filtered"
    unknown = [category for category in guard.categories if labels and category not in labels]
    if unknown:
        problem = f"{guard.model} has no label {unknown[0]!r}; known: {', '.join(labels)}"
        yield "categories", problem


def _entity_rules(settings: SafetySettings, models: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for body in settings.policies.values():
        for guard in body.guard.values():
            if guard.template == "token_classifier":
                yield from map(rule_of, entities_of(models.get(guard.model, ())))


def _fits(rule: str, names: Collection[str]) -> bool:
    if not rule.endswith("*"):
        return rule in names
    return any(name.startswith(rule[:-1]) for name in names)


def _list_lines(
    place: KeyPath, paths: tuple[str, ...], read_list: Callable[[str], str]
) -> Iterator[str]:
    for index, path in enumerate(paths):
        try:
            content = read_list(path)
        except (OSError, UnicodeDecodeError) as error:
            raise _error((*place, index), f"{path}: cannot be read: {error}") from None
        for line in content.splitlines():
            entry = line.strip()
            # Comments begin in the first column: an indented "#" is an entry.
            if not entry or line.startswith("#"):
                continue
            if len(entry) > ENTRY_CHARS_MAX:
                problem = f"{path}: an entry is longer than {ENTRY_CHARS_MAX} characters"
                raise _error((*place, index), problem)
            yield entry


def _error(place: KeyPath, problem: str) -> SettingsError:
    return SettingsError(f"{'.'.join(map(str, (SECTION, *place)))}: {problem}")


MATCH_CHARS_MAX: Final = 2000
"""Longest match of an operator's rule, in characters; the filter of answers may hold back as much.
"""


def custom_rule(rule: RuleSettings) -> RuleSpec:
    """Return `rule` as a specification for prompts and answers.

    Raises:
        PatternError: the pattern is not accepted.
    """
    longest = longest_match(rule.pattern)
    if longest > MATCH_CHARS_MAX:
        raise PatternError(f"matches of up to {longest} characters; at most {MATCH_CHARS_MAX}")
    form = Form(rule.pattern)
    return RuleSpec(rule.id, (form,), Severity.HIGH, longest, rule.validator, context_chars=0)


def problems_of(rule: RuleSettings) -> Iterator[Problem]:
    """Yield the problems of `rule`: a refused pattern, or examples with another result than stated."""
    try:
        spec = custom_rule(rule)
        scanner = RuleSet([spec], max_chars=None)
        # A rule filters answers too, so it must be possible to follow it in a stream.
        Automaton(watched_rules([spec]))
    except PatternError as error:
        yield ("pattern",), str(error)
        return
    for key, examples, expected in (
        ("must_match", rule.must_match, True),
        ("must_not_match", rule.must_not_match, False),
    ):
        for index, example in enumerate(examples):
            if bool(scanner.scan(normalize(example).text)) is not expected:
                problem = "does not match" if expected else "matches"
                yield (key, index), f"{problem}: {example!r}"
