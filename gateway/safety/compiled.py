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
from gateway.safety.policy import Policy, SafetyPolicies, custom_rule
from gateway.safety.rules.lexicon import DENY_LIST, Lexicon
from gateway.safety.rules.payloads import ENCODINGS
from gateway.safety.rules.phones import load_plans
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import RuleSpec, default_rules
from gateway.safety.settings import CUSTOM, LimitSettings, SafetySettings

HIDDEN: Final = "invisible"
"""How payloads of invisible characters are called: "injection.encoded.invisible"."""

UNICODE: Final = (
    "annotation", "ansi", "bidi", "blank", "combining_flood", "control", "filler", "format", "full_width",
    "invisible_only", "invisible_operator", "noncharacter", "soft_hyphen", "styled", "surrogate", "tag",
    "variation_selector", "zero_width",
)  # fmt: skip
"""What normalization takes out, replaces or notices."""
LIMITS: Final = ("encoded", "length", "repetition")

_FAMILIES: Final = ("pii", "secret", "injection", "deny", CUSTOM)


def rule_names() -> frozenset[str]:
    """Every name that a finding in a prompt can have."""
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
    """One policy.

    Attributes:
        rules: for prompts.
        output: for answers; None when the policy does not change them.
        guards: the models that check prompts and answers.
        entity_guards: the token classifiers, whose findings join those of the rules.
        answer_readers: those of them that read answers, which are filtered then.
    """

    policy: Policy
    rules: RuleSet
    output: OutputRules | None = None
    guards: tuple[Guard, ...] = ()
    entity_guards: tuple[EntityGuard, ...] = ()
    answer_readers: tuple[EntityGuard, ...] = ()


@dataclass(frozen=True)
class CompiledPolicies:
    """All policies of a file; immutable.

    Attributes:
        trial: the policy in dry run, if any.
    """

    settings: SafetySettings
    by_name: Mapping[str, CompiledPolicy]
    trial: CompiledPolicy | None

    def choose(self, tenant: str, labels: Mapping[str, str]) -> CompiledPolicy:
        """The policy of a request: that of the first rule that holds, else the default."""
        for rule in self.settings.choose:
            if rule.holds(tenant, labels):
                return self.by_name[rule.policy]
        return self.by_name[self.settings.default]


def compile_policies(policies: SafetyPolicies) -> CompiledPolicies:
    """Takes about a second at first, and a fifth of one for each policy later; another thread may scan meanwhile."""
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
    limits: LimitSettings | None,
) -> RuleSet:
    """Policies with the same lists and limits share compiled rules, those before a reload too."""
    return RuleSet(specs, Lexicon(deny, allow), limits)


def _with_regions(specs: Iterable[RuleSpec], regions: tuple[str, ...] | None) -> Iterator[RuleSpec]:
    """Yield ``specs`` with the regions whose telephone numbers count; their numbering plans are read now."""
    for spec in specs:
        if spec.validator == "phone_national":
            spec = spec if regions is None else replace(spec, options=regions)
            load_plans(spec.options)
        yield spec


def _compiled(
    policy: Policy, specs: tuple[RuleSpec, ...], labels: Mapping[str, Sequence[str]]
) -> CompiledPolicy:
    specs = tuple(_with_regions(specs, policy.settings.phone_regions))
    rules = _rules(specs, policy.deny, policy.allow, policy.settings.limits)
    if not policy.settings.enabled:
        return CompiledPolicy(policy, rules)
    verdicts, tags = [], []
    for name, settings in policy.settings.guard.items():
        own = tuple(labels.get(settings.model, ()))
        if settings.template == "token_classifier":
            entities = EntityTags(own, settings.categories, settings.threshold or 0.0)
            tags.append(EntityGuard(name, settings, entities))
        else:
            verdicts.append(Guard(name, settings, family_of(settings, own)))
    readers = tuple(one for one in tags if "output" in one.settings.checks)
    output = None
    if policy.settings.output.enabled:
        plain = tuple(spec for spec in specs if not spec.scored)
        scanner = _rules(plain, policy.deny, policy.allow, None)
        output = output_rules(policy, watched_rules(plain), scanner, scanner.lists, readers)
    return CompiledPolicy(policy, rules, output, tuple(verdicts), tuple(tags), readers)
