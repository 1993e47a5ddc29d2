"""Loads and checks the safety policies of a configuration; errors name the key."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from gateway.safety.findings import Action
from gateway.safety.guards.entities import entities_of, rule_of
from gateway.safety.output.automaton import Automaton
from gateway.safety.patterns import PatternError
from gateway.safety.policy import (
    ANSWER_RULES,
    SafetyPolicies,
    SafetyPolicy,
    custom_rule,
    rule_names,
)
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.settings import GuardSettings, PolicySettings, RuleSettings, SafetySettings
from gateway.safety.text.normalize import normalize
from sluice.errors import SettingsError
from sluice.settings import problems

SECTION: Final = "safety"
NORMALIZED: Final = ("unicode.", "syntax.")
"""Prefixes of the rules of normalization."""
ENTRY_CHARS_MAX: Final = 256
"""Longest word or phrase of a list, in characters."""
KeyPath = tuple[str | int, ...]
"""Keys and item numbers from the section down to a value."""
Problem = tuple[KeyPath, str]
"""A key, and what is wrong with its value."""


def load_policies(
    section: Mapping[str, Any],
    read_list: Callable[[str], str],
    models: Mapping[str, Sequence[str]],
    token_classifiers: Collection[str] = (),
) -> SafetyPolicies:
    """Check and load the policies of a configuration.

    Args:
        section: settings `safety:`; if empty, one policy `default` with the defaults of `PolicySettings`.
        read_list: returns the content of a list file by its path; may raise OSError or UnicodeDecodeError.
        models: labels of all models by name, an empty tuple for those that do not classify.
        token_classifiers: names of the models that classify tokens.

    Raises:
        SettingsError: the message names the key.
    """
    try:
        settings = SafetySettings.model_validate(section, context=models)
    except ValidationError as error:
        raise SettingsError("\n".join(problems(error, SafetySettings, SECTION))) from None
    contradictions = _contradictions(settings, models, token_classifiers)
    if lines := [str(_error(place, problem)) for place, problem in contradictions]:
        raise SettingsError("\n".join(lines))
    policies = {
        name: SafetyPolicy(
            name,
            body,
            tuple(_list_lines(("policies", name, "deny"), body.deny, read_list)),
            tuple(_list_lines(("policies", name, "allow"), body.allow, read_list)),
            settings.rules,
            models,
        )
        for name, body in settings.policies.items()
    }
    return SafetyPolicies(policies, settings)


def _contradictions(
    settings: SafetySettings,
    models: Mapping[str, Sequence[str]],
    token_classifiers: Collection[str],
) -> Iterator[Problem]:
    """Yield contradictions between keys that are right by themselves."""
    places: dict[KeyPath, str | None] = {
        ("default",): settings.default,
        ("dry_run",): settings.dry_run,
    }
    places |= {("choose", i, "policy"): rule.policy for i, rule in enumerate(settings.choose)}
    for place, name in places.items():
        if name is not None and name not in settings.policies:
            yield place, f"no policy {name!r}; known: {', '.join(settings.policies)}"
    names = [rule.name for rule in settings.rules]
    for index, rule in enumerate(settings.rules):
        if rule.name in names[:index]:
            yield ("rules", index, "name"), f"two rules have the name {rule.name!r}"
        for place, problem in problems_of(rule):
            yield ("rules", index, *place), f"{rule.name}: {problem}"
    known_rules = {*rule_names(), *ANSWER_RULES, *(rule.id for rule in settings.rules)}
    for policy in settings.policies.values():
        for guard in policy.guard.values():
            if guard.template == "token_classifier":
                known_rules.update(map(rule_of, entities_of(models.get(guard.model, ()))))
    for name, policy in settings.policies.items():
        for place, problem in _action_problems(policy, known_rules):
            yield ("policies", name, *place), problem
        for guard_name, guard in policy.guard.items():
            for key, problem in _guard_problems(guard, policy, models, token_classifiers):
                yield ("policies", name, "guard", guard_name, key), problem


def _action_problems(policy: PolicySettings, known_rules: Collection[str]) -> Iterator[Problem]:
    """Yield unknown rules, and actions that a rule cannot have."""
    actions = [("actions", rule) for rule in policy.actions]
    for *keys, rule in (*actions, *(("output", "actions", rule) for rule in policy.output.actions)):
        fits = rule in known_rules
        if rule.endswith("*"):
            fits = any(name.startswith(rule[:-1]) for name in known_rules)
        if not fits:
            yield (*keys, rule), f"no rule {rule!r}"
    for rule, choice in policy.actions.items():
        place = "actions", rule
        if rule.startswith("output."):
            yield place, "only answers have this rule; name it under output.actions"
        if rule == "limit.length" and choice.action is not Action.BLOCK:
            yield place, "must block: longer text is not inspected"
        if rule.startswith(NORMALIZED) and choice.action in (Action.REMOVE, Action.REDACT):
            problem = "normalization has edited the text already; use flag, block or {route: MODEL}"
            yield place, problem


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


def problems_of(rule: RuleSettings) -> Iterator[Problem]:
    """Yield the problems of `rule`: a refused pattern, or examples with another result than stated."""
    try:
        spec = custom_rule(rule)
        scanner = RuleSet([spec], is_prompt=False)
        # A rule filters answers too, so it must be possible to follow it in a stream.
        Automaton([spec])
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
