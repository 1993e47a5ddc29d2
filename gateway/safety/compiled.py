"""Compiles policies for prompts and answers (once, off the event loop), and lists the names of all rules."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from gateway.safety.guards.checks import EntityGuard, Guard
from gateway.safety.guards.entities import EntityTags
from gateway.safety.guards.families import family_of
from gateway.safety.output.automaton import watched_rules
from gateway.safety.output.filter import OutputRules, output_rules
from gateway.safety.policy import SafetyPolicies, SafetyPolicy, custom_rule
from gateway.safety.rules.lexicon import DENY_LIST, Lexicon
from gateway.safety.rules.payloads import ENCODINGS
from gateway.safety.rules.phones import load_plans
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import RuleSpec, default_rules
from gateway.safety.settings import CUSTOM, SafetySettings

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


def rule_names() -> frozenset[str]:
    """Return every name that a finding in a prompt can have."""
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


@dataclass(frozen=True)
class CompiledPolicy:
    """A policy, ready to use.

    Attributes:
        rules: rules for prompts.
        output: rules for answers; None if the policy does not change them.
        guards: guard models that check prompts and answers.
        prompt_readers: token classifiers that read prompts; their findings join those of the rules.
        answer_readers: token classifiers that read answers, which are filtered then.
    """

    policy: SafetyPolicy
    rules: RuleSet
    output: OutputRules | None = None
    guards: tuple[Guard, ...] = ()
    prompt_readers: tuple[EntityGuard, ...] = ()
    answer_readers: tuple[EntityGuard, ...] = ()


@dataclass(frozen=True)
class CompiledPolicies:
    """All policies of a configuration; immutable.

    Attributes:
        trial: the policy in dry run, if there is one.
    """

    settings: SafetySettings
    by_name: Mapping[str, CompiledPolicy]
    trial: CompiledPolicy | None


def compile_policies(policies: SafetyPolicies) -> CompiledPolicies:
    """Compile all policies; takes a second at first, and a fifth of one for each further policy.

    Other threads may scan meanwhile.
    """
    settings = policies.settings
    specs = (*default_rules(), *map(custom_rule, settings.rules))
    compiled = {
        name: _compiled(policy, specs, policies.labels) for name, policy in policies.by_name.items()
    }
    return CompiledPolicies(settings, compiled, compiled.get(settings.dry_run or ""))


@lru_cache(maxsize=8)
def _rules(
    specs: tuple[RuleSpec, ...],
    deny: tuple[str, ...],
    allow: tuple[str, ...],
    max_chars: int | None,
) -> RuleSet:
    """Compile rules; policies with the same lists and limit share them, also across reloads."""
    return RuleSet(specs, Lexicon(deny, allow), max_chars)


def _with_regions(specs: Iterable[RuleSpec], regions: tuple[str, ...] | None) -> Iterator[RuleSpec]:
    """Yield `specs` with the regions of telephone numbers, and read their numbering plans now."""
    for spec in specs:
        # Reading a numbering plan takes a millisecond, which no request should wait for.
        if spec.validator == "phone_national":
            spec = spec if regions is None else replace(spec, options=regions)
            load_plans(spec.options)
        yield spec


def _compiled(
    policy: SafetyPolicy, specs: tuple[RuleSpec, ...], labels: Mapping[str, Sequence[str]]
) -> CompiledPolicy:
    specs = tuple(_with_regions(specs, policy.settings.phone_regions))
    rules = _rules(specs, policy.deny, policy.allow, policy.settings.max_chars)
    # Such a policy still normalizes prompts and limits their length.
    if not policy.settings.enabled:
        return CompiledPolicy(policy, rules)
    guards, entity_guards = [], []
    for name, settings in policy.settings.guard.items():
        model_labels = tuple(labels.get(settings.model, ()))
        if settings.template == "token_classifier":
            entities = EntityTags(model_labels, settings.categories, settings.threshold or 0.0)
            entity_guards.append(EntityGuard(name, settings, entities))
        else:
            guards.append(Guard(name, settings, family_of(settings, model_labels)))
    prompt_readers, answer_readers = (
        tuple(guard for guard in entity_guards if stage in guard.settings.checks)
        for stage in ("input", "output")
    )
    # Injections are no matter of answers, so scored rules are not followed there.
    unscored = tuple(spec for spec in specs if not spec.scored)
    scanner = _rules(unscored, policy.deny, policy.allow, None)
    output = output_rules(policy, watched_rules(unscored), scanner, scanner.lists, answer_readers)
    return CompiledPolicy(policy, rules, output, tuple(guards), prompt_readers, answer_readers)
