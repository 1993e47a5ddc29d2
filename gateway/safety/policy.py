"""Safety policies (which rule has which action), compiled for prompts and answers; and the names of all rules.

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

`SafetyPolicies` never change once they are loaded (`gateway.safety.loading`). A request keeps the
policy that it began with.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Final

from gateway.safety.findings import Action, ActionTable, Choice, Severity
from gateway.safety.guards.checks import EntityGuard, Guard
from gateway.safety.guards.entities import EntityTags
from gateway.safety.guards.families import family_of
from gateway.safety.output.filter import output_rules
from gateway.safety.output.redactor import OutputRules
from gateway.safety.patterns import PatternError, longest_match
from gateway.safety.rules.lexicon import DENY_LIST, Lexicon
from gateway.safety.rules.payloads import ENCODINGS
from gateway.safety.rules.phones import load_plans
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import Form, RuleSpec, default_rules
from gateway.safety.settings import (
    CUSTOM,
    GuardSettings,
    PolicySettings,
    RuleSettings,
    SafetySettings,
    Stage,
)

HIDDEN: Final = "invisible"
"""Name of payloads in invisible characters: "injection.encoded.invisible"."""

UNICODE: Final = (
    "annotation", "ansi", "bidi", "blank", "combining_flood", "control", "filler", "format", "full_width",
    "invisible_only", "invisible_operator", "noncharacter", "soft_hyphen", "styled", "surrogate", "tag",
    "variation_selector", "zero_width",
)  # fmt: skip
"""Findings of normalization: what it removes, replaces or notices."""
LIMITS: Final = ("encoded", "length", "repetition")
"""Findings about limits on a prompt."""

_FAMILIES: Final = ("pii", "secret", "injection", "deny", CUSTOM)
"""Families of rules whose findings may be hidden in a payload."""
ANSWER_RULES: Final = {
    "output.canary": Choice(Action.BLOCK),
    "output.markdown_image": Choice(Action.ALLOW),
    "output.ansi": Choice(Action.ALLOW),
    "output.system_echo": Choice(Action.ALLOW),
}
"""Rules for answers only, with their actions unless a policy names them under `output.actions`."""
_SECRETS: Final = "secret.*"
"""Redacted in answers unless the policy sets an action: a leak must be allowed explicitly."""
_ALWAYS: Final = {rule: Choice(Action.BLOCK) for rule in ("limit.length", "unicode.invisible_only")}
"""Actions unless the policy sets others: text that was not inspected, or is no text, blocks."""
MATCH_CHARS_MAX: Final = 2000
"""Longest match of an operator's rule, in characters; the filter of answers may hold back as much.
"""


def rule_names() -> frozenset[str]:
    """Return every name that a finding in a prompt can have, own rules and entities apart."""
    encodings = (*(encoding.name for encoding in ENCODINGS), "rot13", HIDDEN)
    return frozenset(
        (
            "syntax.chat_template",
            DENY_LIST,
            "injection.encoded.nested",
            *(spec.id for spec in default_rules()),
            *(f"unicode.{name}" for name in UNICODE),
            *(f"limit.{name}" for name in LIMITS),
            *(f"{family}.encoded.{name}" for family in _FAMILIES for name in encodings),
        )
    )


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


@lru_cache(maxsize=8)
def _rules(
    specs: tuple[RuleSpec, ...],
    deny: tuple[str, ...],
    allow: tuple[str, ...],
    is_prompt: bool,
) -> RuleSet:
    """Compile rules; policies with the same lists share them, also across reloads."""
    return RuleSet(specs, Lexicon(deny, allow), is_prompt=is_prompt)


@dataclass(frozen=True)
class SafetyPolicy:
    """One policy as requests carry it; its rules are compiled when they are first needed.

    Attributes:
        name: its key in the configuration.
        settings: the policy as configured.
        deny: lines of the deny lists.
        allow: lines of the allow lists.
        own_rules: rules of the operator.
        labels: labels of the models that classify, by model name.
    """

    name: str
    settings: PolicySettings
    deny: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    own_rules: tuple[RuleSettings, ...] = ()
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def version(self) -> str:
        """Name, and hash of the settings, lists and own rules: "standard@0123456789ab"."""
        rules = [rule.model_dump(mode="json") for rule in self.own_rules]
        content = [self.settings.model_dump(mode="json"), self.deny, self.allow, *rules]
        plain = json.dumps(content, sort_keys=True, ensure_ascii=True)
        return f"{self.name}@{hashlib.sha256(plain.encode()).hexdigest()[:12]}"

    @cached_property
    def actions(self) -> ActionTable:
        """Actions for prompts."""
        settings = self.settings
        severities = {Severity[name.upper()]: choice for name, choice in settings.severity.items()}
        custom = {rule.id: rule.action for rule in self.own_rules if rule.action is not None}
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
        return ActionTable(rules | defaults | output.actions, severities)

    @cached_property
    def rules(self) -> RuleSet:
        """Rules for prompts, compiled but not applied if the policy is not enabled."""
        return _rules(self._specs, self.deny, self.allow, is_prompt=True)

    @cached_property
    def output(self) -> OutputRules | None:
        """Rules for answers; None if the policy leaves them alone."""
        if not self.settings.enabled:
            return None
        # Injections are no matter of answers, so scored rules are not followed there.
        specs = tuple(spec for spec in self._specs if not spec.scored)
        rules = _rules(specs, self.deny, self.allow, is_prompt=False)
        shared = output_rules(self.settings.output, self.output_actions, specs, rules, rules.lists)
        readers = self.answer_readers
        return replace(
            shared,
            version=self.version,
            restore=self.settings.restore,
            window_tokens=min((guard.settings.window_tokens for guard in readers), default=None),
            holds=any(shared.table.edits(rule) for guard in readers for rule in guard.tags.rules),
        )

    @cached_property
    def guards(self) -> tuple[Guard, ...]:
        """Guard models that give verdicts on prompts and answers."""
        return tuple(
            Guard(name, settings, family_of(settings, self._labels_of(settings)))
            for name, settings in self._guard_settings
            if settings.template != "token_classifier"
        )

    @cached_property
    def prompt_readers(self) -> tuple[EntityGuard, ...]:
        """Token classifiers that read prompts; their findings join those of the rules."""
        return tuple(self._readers("input"))

    @cached_property
    def answer_readers(self) -> tuple[EntityGuard, ...]:
        """Token classifiers that read answers, which are filtered then."""
        return tuple(self._readers("output"))

    def compile(self) -> None:
        """Compile all parts now, which takes up to a second."""
        for spec in self._specs:
            # Reading a numbering plan takes a millisecond, which no request should wait for.
            if spec.validator == "phone_national":
                load_plans(spec.options)
        _ = self.rules, self.output, self.guards, self.prompt_readers

    @cached_property
    def _specs(self) -> tuple[RuleSpec, ...]:
        """Default and own rules, with the policy's regions of telephone numbers."""
        regions = self.settings.phone_regions
        return tuple(
            replace(spec, options=regions)
            if regions is not None and spec.validator == "phone_national"
            else spec
            for spec in (*default_rules(), *map(custom_rule, self.own_rules))
        )

    @property
    def _guard_settings(self) -> Iterable[tuple[str, GuardSettings]]:
        return self.settings.guard.items() if self.settings.enabled else ()

    def _labels_of(self, guard: GuardSettings) -> tuple[str, ...]:
        return tuple(self.labels.get(guard.model, ()))

    def _readers(self, stage: Stage) -> Iterator[EntityGuard]:
        for name, settings in self._guard_settings:
            if settings.template == "token_classifier" and stage in settings.checks:
                threshold = settings.threshold or 0.0
                tags = EntityTags(self._labels_of(settings), settings.categories, threshold)
                yield EntityGuard(name, settings, tags)


@dataclass(frozen=True)
class SafetyPolicies:
    """All policies of a configuration; the settings say which request gets which."""

    by_name: Mapping[str, SafetyPolicy]
    settings: SafetySettings

    @property
    def trial(self) -> SafetyPolicy | None:
        """The policy in dry run, if there is one."""
        return self.by_name.get(self.settings.dry_run or "")

    def compile(self) -> None:
        """Compile all policies now: a second at first, a fifth of one for each further policy.

        Other threads may scan meanwhile.
        """
        for policy in self.by_name.values():
            policy.compile()


def _unrouted(choice: Choice) -> Choice:
    return Choice(Action.FLAG) if choice.action is Action.ROUTE else choice
