"""Inspection of a prompt (normalize, search, decide) and of its answer.

The model gets the normalized text with the edits of the policy. Rules search three views: the normalized text, its
skeleton (for injections alone, where look-alikes of letters matter) and what invisible characters of the original
spell. Every finding has offsets in the original text.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.safety.actions import Action, Placeholders, TakenAction, apply
from gateway.safety.compiled import HIDDEN, CompiledPolicies, CompiledPolicy
from gateway.safety.dry_run import DryRun, Move, moves_of
from gateway.safety.findings import Finding, Severity
from gateway.safety.guards.checks import Decided, EntityGuard
from gateway.safety.output.assembled import AssembledFilter
from gateway.safety.output.filter import OutputFilter
from gateway.safety.text.edited_text import Normalized
from gateway.safety.text.invisible import smuggled
from gateway.safety.text.normalize import normalize
from gateway.safety.text.skeleton import Skeleton

TOO_LONG: Final = "limit.length"
"""The rule that finds a text too long to be inspected."""
_NOTICED: Final = frozenset({TOO_LONG, "unicode.invisible_only"})
"""What is found without a change of the text."""


@dataclass
class InspectedText:
    """The result for one text.

    Attributes:
        normalized: before the edits of the policy; empty when the text is over the length limit.
        text: what a model may see.
        found: by place.
    """

    normalized: str
    text: str
    found: tuple[TakenAction, ...] = ()


@dataclass(frozen=True)
class FoundEntities:
    """What token classifiers say of the texts of a request.

    Attributes:
        by_text: the entities in each normalized text; empty: no classifier reads prompts.
        failed: rule and action of each classifier that gave no answer.
    """

    by_text: Sequence[Sequence[Finding]] = ()
    failed: Sequence[tuple[str, Action]] = ()


NO_ENTITIES: Final = FoundEntities()


@dataclass(frozen=True)
class PromptVerdict:
    """The decision about a request, all its texts together.

    Attributes:
        blocked: names of the rules that block, each once.
        route: the most severe finding that routes, with its model.
        taken: findings by rule and action.
    """

    blocked: tuple[str, ...]
    route: TakenAction | None
    taken: Mapping[tuple[str, Action], int]

    @property
    def governed(self) -> tuple[str, str] | None:
        """The model that must answer by the policy, if it names one, and the rule."""
        route = self.route
        return None if route is None or route.model is None else (route.model, route.rule)


_NO_FINDINGS: Final = PromptVerdict((), None, {})


def verdict_on(
    inspected: Sequence[InspectedText], failed: Sequence[tuple[str, Action]] = ()
) -> PromptVerdict:
    """The verdict on the texts of one request; ``failed`` as in `FoundEntities`."""
    found = [each for text in inspected for each in text.found]
    if not found and not failed:
        return _NO_FINDINGS
    taken = [*((each.rule, each.action) for each in found), *failed]
    blocked = dict.fromkeys(rule for rule, action in taken if action is Action.BLOCK)
    routes = [each for each in found if each.action is Action.ROUTE]
    route = max(routes, key=lambda each: each.severity) if routes else None
    return PromptVerdict(tuple(blocked), route, Counter(taken))


class Inspector:
    """The policies of one configuration. `begin` and `rehearse` may run in other threads, the rest belongs to the
    event loop.

    Attributes:
        dry_run: the counts of the policy that is tried, if one is.
    """

    def __init__(self, compiled: CompiledPolicies, before: "Inspector | None" = None) -> None:
        """``before``: the one that this one replaces; a dry run continues when its policy is unchanged."""
        self._compiled = compiled
        trial, counts = compiled.trial, before.dry_run if before else None
        if trial is None or counts is None or counts.policy != trial.policy.version:
            counts = None if trial is None else DryRun(trial.policy.version)
        self.dry_run: DryRun | None = counts

    @property
    def versions(self) -> list[str]:
        """Of its policies."""
        return sorted(one.policy.version for one in self._compiled.by_name.values())

    def begin(
        self, tenant: str, labels: Mapping[str, str], texts: Sequence[str]
    ) -> "RequestInspection":
        """The inspection of one request with all its ``texts``; the policy is chosen here and stays."""
        return RequestInspection(self._compiled.choose(tenant, labels), texts)

    def rehearse(self, inspection: "RequestInspection") -> list[InspectedText]:
        """The texts of ``inspection`` as the policy in dry run would treat them; empty when there is none to try.

        It decides about the entities that the active policy's classifiers found; its own are not asked.
        """
        trial = self._compiled.trial
        if trial is None or trial.policy is inspection.policy:
            return []
        return list(RequestInspection(trial, inspection.texts).results(inspection.entities))

    def count(
        self, inspected: Sequence[InspectedText], tried: Sequence[InspectedText]
    ) -> Counter[Move]:
        """Counts and returns the differences between the active policy and the one in dry run, if that was tried."""
        total: Counter[Move] = Counter()
        for now, then in zip(inspected, tried, strict=False):
            moves = moves_of(now.found, then.found)
            if self.dry_run is not None:
                self.dry_run.add(moves, _outcome(now) != _outcome(then))
            total += moves
        return total

    def assembled(self, tenant: str, labels: Mapping[str, str]) -> AssembledFilter | None:
        """Return the filter of what is assembled from an answer; None when its policy leaves answers alone."""
        rules = self._compiled.choose(tenant, labels).output
        return None if rules is None else AssembledFilter(rules)

    def answer(self, inspection: "RequestInspection", system: str) -> OutputFilter | None:
        """The filter of the answer to a request; None when its policy leaves answers alone.

        Args:
            inspection: of the prompt, all its texts done.
            system: the system message as the model gets it.
        """
        rules = inspection.compiled.output
        if rules is None:
            return None
        trial = self._compiled.trial
        tried = None if trial is None or trial.policy is inspection.policy else trial.output
        return OutputFilter(rules, inspection.placeholders, system, tried, self.dry_run)


class RequestInspection:
    """The texts of one request. They share their placeholders: the same value reads the same in every turn.

    Attributes:
        compiled: the policy that decides, with its rules.
        policy: the policy as it was written.
        texts: as they came.
        checks: of token classifiers, what is recorded of each.
        entities, inspected, verdict: what `decide` decided.
    """

    inspected: Sequence[InspectedText]
    verdict: PromptVerdict

    def __init__(self, compiled: CompiledPolicy, texts: Sequence[str]) -> None:
        self.compiled = compiled
        self.policy = compiled.policy
        self.texts = tuple(texts)
        self.checks: Sequence[Decided] = ()
        self.entities = NO_ENTITIES
        self._longest = self.policy.settings.limits.max_chars
        self._normalized = [
            normalize(text) if len(text) <= self._longest else self._too_long(text)
            for text in texts
        ]
        self._placeholders: Placeholders | None = None

    @property
    def entity_guards(self) -> list[EntityGuard]:
        """The token classifiers that read prompts."""
        guards = self.compiled.entity_guards
        return [guard for guard in guards if "input" in guard.settings.checks]

    def placeholders(self) -> Placeholders:
        """Those of the values redacted so far."""
        if self._placeholders is None:
            self._placeholders = Placeholders(self.normalized)
        return self._placeholders

    @property
    def normalized(self) -> list[str]:
        """What token classifiers read; empty where a text is over the length limit."""
        return [each.text for each in self._normalized]

    def decide(self, entities: FoundEntities) -> None:
        """Inspects all texts; ``entities`` are what token classifiers found in them."""
        self.entities, self.inspected = entities, list(self.results(entities))
        self.verdict = verdict_on(self.inspected, entities.failed)

    def results(self, entities: FoundEntities = NO_ENTITIES) -> Iterator[InspectedText]:
        """One for each text, in order; each step is one text's work."""
        by_text = entities.by_text or [()] * len(self.texts)
        for original, normalized, found in zip(self.texts, self._normalized, by_text, strict=True):
            seen = self._seen(normalized.text)
            if found:
                seen.update(self.compiled.rules.lists.without_allowed(normalized.text, found))
            if seen or normalized.findings:
                yield self._decided(original, normalized, seen)
            else:
                yield InspectedText(normalized.text, normalized.text)

    def _too_long(self, text: str) -> Normalized:
        """Text over the length limit is not inspected, so it costs nothing."""
        too_long = Finding(TOO_LONG, self._longest, len(text), Severity.CRITICAL)
        return Normalized("", (too_long,))

    def _seen(self, text: str) -> set[Finding]:
        """What is in ``text``, and the injections that show only in its look."""
        if not self.policy.settings.enabled:
            return set()
        seen = set(self.compiled.rules.scan(text))
        if not text.isascii():
            look = Skeleton(text)
            for each in self.compiled.rules.scan(look.text) if look.text != text else ():
                if each.rule.startswith("injection."):
                    start, end = look.original_span(each.start, each.end)
                    seen.add(Finding(each.rule, start, end, each.severity))
        return seen

    def _decided(self, original: str, normalized: Normalized, seen: set[Finding]) -> InspectedText:
        decision = apply(self.policy.actions, normalized.text, seen, self.placeholders())
        found = [
            TakenAction(
                one.rule,
                one.severity,
                one.action,
                *normalized.original_span(one.start, one.end),
                one.model,
            )
            for one in decision.taken
        ]
        found += map(self._noticed, (*normalized.findings, *self._hidden(original)))
        found.sort(key=lambda each: (each.start, each.end, each.rule))
        return InspectedText(normalized.text, decision.text, tuple(found))

    def _hidden(self, original: str) -> Iterator[Finding]:
        if len(original) <= self._longest and self.policy.settings.enabled:
            for start, end, payload in smuggled(original):
                yield from self.compiled.rules.scan_hidden(payload, HIDDEN, (start, end))

    def _noticed(self, finding: Finding) -> TakenAction:
        """What normalization has found, and edited; it may still end or route the request."""
        taken = self.policy.actions.taken(finding)
        action = taken.action
        if action not in (Action.ROUTE, Action.BLOCK):
            noticed = Action.ALLOW if action is Action.ALLOW else Action.FLAG
            action = noticed if finding.rule in _NOTICED else Action.REMOVE
        return replace(taken, action=action)


def _outcome(inspected: InspectedText) -> tuple[str, tuple[str, ...], str | None]:
    verdict = verdict_on([inspected])
    return inspected.text, verdict.blocked, verdict.route.model if verdict.route else None
