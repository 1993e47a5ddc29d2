"""The whole way of a prompt through the safety layer: normalize, look, decide.

The text that a model gets is the normalized one with the edits of the policy. Rules look at three views: the
normalized text, its skeleton (for injections alone, where look-alikes of letters matter) and what invisible characters
of the original spell. Every finding says where in the original text it is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.safety.actions import Action, Choice, apply
from gateway.safety.findings import Finding, Severity
from gateway.safety.names import HIDDEN, LIST
from gateway.safety.policy import Policies, Policy
from gateway.safety.redaction import Placeholders
from gateway.safety.rules import Limits, ListKind, PhraseList, RuleSet, default_rules
from gateway.safety.text import Normalized, normalize, skeleton, smuggled

_NOTICED: Final = frozenset({"limit.length", "unicode.homoglyph", "unicode.invisible_only"})
"""What is found without a change of the text."""


@dataclass(frozen=True, slots=True)
class Found:
    """A finding and what was done about it.

    Attributes:
        start: first character, an offset into the text as it came.
        end: one past the last one.
        model: the governed model of a ROUTE.
    """

    rule: str
    severity: Severity
    action: Action
    start: int
    end: int
    model: str | None = None


@dataclass(frozen=True)
class Inspected:
    """What became of one text.

    Attributes:
        normalized: before the policy edited it; empty when the text is too long to be looked at.
        text: what a model may see.
        found: by place.
    """

    normalized: str
    text: str
    found: tuple[Found, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What is decided about a request, all its texts together.

    Attributes:
        blocked: names of the rules that block, each once.
        route: the most severe finding that routes, with its model.
        taken: findings by rule and action.
    """

    blocked: tuple[str, ...]
    route: Found | None
    taken: Mapping[tuple[str, Action], int]


def verdict_on(inspected: Sequence[Inspected]) -> Verdict:
    """The verdict on the texts of one request."""
    found = [each for text in inspected for each in text.found]
    blocked = dict.fromkeys(each.rule for each in found if each.action is Action.BLOCK)
    routes = [each for each in found if each.action is Action.ROUTE]
    route = max(routes, key=lambda each: each.severity) if routes else None
    return Verdict(tuple(blocked), route, Counter((each.rule, each.action) for each in found))


class Inspector:
    """The policies, compiled once. Not for two threads at once."""

    def __init__(self, policies: Policies) -> None:
        """Takes about a second. Raises `RuleError` for a list that cannot be used."""
        self._policies = policies
        specs = default_rules()
        self._rules = {
            name: RuleSet(specs, phrases=phrases_of(policy), limits=_limits_of(policy))
            for name, policy in policies.by_name.items()
        }

    def begin(
        self, tenant: str, labels: Mapping[str, str], texts: Sequence[str]
    ) -> "RequestInspection":
        """The inspection of one request with all its ``texts``; the policy is chosen here and stays."""
        policy = self._policies.choose(tenant, labels)
        return RequestInspection(policy, self._rules[policy.name], texts)


class RequestInspection:
    """The texts of one request. They share their placeholders: the same value reads the same in every turn.

    Attributes:
        policy: the one that decides.
    """

    def __init__(self, policy: Policy, rules: RuleSet, texts: Sequence[str]) -> None:
        self.policy = policy
        self._rules = rules
        self._longest = policy.settings.limits.max_chars
        self._texts = [(text, self._normalized(text)) for text in texts]
        self._placeholders = Placeholders(normalized.text for _, normalized in self._texts)

    def results(self) -> Iterator[Inspected]:
        """One for each text, in order; each step is one text's work."""
        for original, normalized in self._texts:
            yield self._inspect(original, normalized)

    def _normalized(self, text: str) -> Normalized:
        """What is too long is not looked at, so it costs nothing."""
        if len(text) <= self._longest:
            return normalize(text)
        too_long = Finding("limit.length", self._longest, len(text), Severity.CRITICAL)
        return Normalized("", (too_long,))

    def _inspect(self, original: str, normalized: Normalized) -> Inspected:
        seen = self._seen(normalized.text)
        decision = apply(self.policy.actions, normalized.text, seen, self._placeholders)
        found = [self._found(taken.finding, taken.action, normalized) for taken in decision.taken]
        found += [self._done(finding) for finding in normalized.findings]
        found += [self._done(finding) for finding in self._hidden(original)]
        found.sort(key=lambda each: (each.start, each.end, each.rule))
        return Inspected(normalized.text, decision.text, tuple(found))

    def _seen(self, text: str) -> set[Finding]:
        """What is in ``text``, and the injections that show only in its look."""
        seen = set(self._rules.scan(text))
        look = skeleton(text)
        if look.text != text:
            for each in self._rules.scan(look.text):
                if each.rule.startswith("injection."):
                    start, end = look.original_span(each.start, each.end)
                    seen.add(Finding(each.rule, start, end, each.severity))
        return seen

    def _hidden(self, original: str) -> Iterator[Finding]:
        if len(original) <= self._longest:
            for start, end, payload in smuggled(original):
                yield from self._rules.scan_hidden(payload, HIDDEN, (start, end))

    def _found(self, finding: Finding, action: Action, normalized: Normalized) -> Found:
        start, end = normalized.original_span(finding.start, finding.end)
        model = self._choice(finding).model if action is Action.ROUTE else None
        return Found(finding.rule, finding.severity, action, start, end, model)

    def _done(self, finding: Finding) -> Found:
        """A finding about what normalization has edited already; it may still end or route the request."""
        choice = self._choice(finding)
        action = choice.action
        if action not in (Action.ROUTE, Action.BLOCK):
            noticed = Action.ALLOW if action is Action.ALLOW else Action.FLAG
            action = noticed if finding.rule in _NOTICED else Action.REMOVE
        return Found(
            finding.rule, finding.severity, action, finding.start, finding.end, choice.model
        )

    def _choice(self, finding: Finding) -> Choice:
        return self.policy.actions.choose(finding.rule, finding.severity)


def phrases_of(policy: Policy) -> list[PhraseList]:
    """The operator's lists of ``policy``."""
    lists = [PhraseList(LIST, policy.deny), PhraseList(LIST, policy.allow, ListKind.ALLOW)]
    return [each for each in lists if each.entries]


def _limits_of(policy: Policy) -> Limits:
    limits = policy.settings.limits
    return Limits(limits.max_chars, limits.max_run_chars, limits.max_word_chars)
