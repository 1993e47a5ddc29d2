"""Inspection of a prompt (normalize, search, decide) and of its answer.

The model gets the normalized text, edited by the policy. Rules search three views: the normalized
text, its skeleton (for injections only, where letters are replaced by look-alikes) and what
invisible characters of the original spell. Every finding has offsets in the original text.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.safety.actions import Action, Placeholders, TakenAction, apply
from gateway.safety.compiled import HIDDEN, CompiledPolicies, CompiledPolicy
from gateway.safety.dry_run import DryRun, Move, moves_of
from gateway.safety.findings import BY_PLACE, Finding, Severity
from gateway.safety.guards.checks import Decided, EntityGuard
from gateway.safety.output.assembled import AssembledFilter
from gateway.safety.output.filter import OutputFilter
from gateway.safety.text.edited_text import Normalized
from gateway.safety.text.invisible import smuggled
from gateway.safety.text.normalize import normalize
from gateway.safety.text.skeleton import Skeleton

TOO_LONG: Final = "limit.length"
"""Rule that reports a text too long to be inspected."""
_NOTICED: Final = frozenset({TOO_LONG, "unicode.invisible_only"})
"""Rules of normalization that do not change the text."""


@dataclass
class InspectedText:
    """The result for one text.

    Attributes:
        normalized: the text before the edits of the policy; empty if it is over the length limit.
        text: the text for the model.
        found: findings with their actions, by place.
    """

    normalized: str
    text: str
    taken: tuple[TakenAction, ...] = ()


@dataclass(frozen=True)
class EntityResults:
    """Entities that token classifiers found in the texts of a request.

    Attributes:
        by_text: entities in each normalized text; empty if no classifier reads prompts.
        failed: rule and action of each classifier that failed.
    """

    by_text: Sequence[Sequence[Finding]] = ()
    failed: Sequence[tuple[str, Action]] = ()


NO_ENTITIES: Final = EntityResults()


@dataclass(frozen=True)
class PromptVerdict:
    """The decision about a request, all its texts together.

    Attributes:
        blocked: names of the rules that block, each once.
        route: the most severe finding that routes, with its model.
        taken: count of findings by rule and action.
    """

    blocked: tuple[str, ...]
    route: TakenAction | None
    taken: Mapping[tuple[str, Action], int]

    @property
    def governed(self) -> tuple[str, str] | None:
        """Model that must answer by the policy, and the rule that asked for it; None if there is none."""
        route = self.route
        return None if route is None or route.model is None else (route.model, route.rule)


_NO_FINDINGS: Final = PromptVerdict((), None, {})


def verdict_on(
    inspected: Sequence[InspectedText], failed: Sequence[tuple[str, Action]] = ()
) -> PromptVerdict:
    """Decide about the texts of one request; `failed` as in `EntityResults`."""
    findings = [taken for text in inspected for taken in text.taken]
    if not findings and not failed:
        return _NO_FINDINGS
    actions = [*((taken.rule, taken.action) for taken in findings), *failed]
    blocked = dict.fromkeys(rule for rule, action in actions if action is Action.BLOCK)
    routes = [taken for taken in findings if taken.action is Action.ROUTE]
    route = max(routes, key=lambda taken: taken.severity) if routes else None
    return PromptVerdict(tuple(blocked), route, Counter(actions))


class Inspector:
    """The policies of one configuration.

    `begin` and `rehearse` may run in other threads; everything else belongs to the event loop.

    Attributes:
        dry_run: counts of the policy in dry run, if there is one.
    """

    def __init__(self, compiled: CompiledPolicies, before: "Inspector | None" = None) -> None:
        """Continue the dry run of `before`, the inspector that this one replaces, if its policy is unchanged."""
        self._compiled = compiled
        trial, counts = compiled.trial, before.dry_run if before else None
        if trial is None or counts is None or counts.policy != trial.policy.version:
            counts = None if trial is None else DryRun(trial.policy.version)
        self.dry_run: DryRun | None = counts

    @property
    def versions(self) -> list[str]:
        """Versions of its policies."""
        return sorted(compiled.policy.version for compiled in self._compiled.by_name.values())

    def begin(
        self, tenant: str, labels: Mapping[str, str], texts: Sequence[str]
    ) -> "RequestInspection":
        """Begin to inspect a request with all its `texts`; the policy is chosen here and stays."""
        return RequestInspection(self._compiled.choose(tenant, labels), texts)

    def rehearse(self, inspection: "RequestInspection") -> list[InspectedText]:
        """Inspect the texts of `inspection` by the policy in dry run; return nothing if there is none.

        The policy in dry run decides about the entities that the active policy's classifiers found;
        its own are not run.
        """
        trial = self._compiled.trial
        if trial is None or trial.policy is inspection.policy:
            return []
        return list(RequestInspection(trial, inspection.texts).results(inspection.entities))

    def count(
        self, inspected: Sequence[InspectedText], trial_results: Sequence[InspectedText]
    ) -> Counter[Move]:
        """Count the differences between the active policy and the one in dry run, and return them."""
        total: Counter[Move] = Counter()
        for active, trial in zip(inspected, trial_results, strict=False):
            moves = moves_of(active.taken, trial.taken)
            if self.dry_run is not None:
                self.dry_run.add(moves, _outcome(active) != _outcome(trial))
            total += moves
        return total

    def assembled(self, tenant: str, labels: Mapping[str, str]) -> AssembledFilter | None:
        """Return the filter of what is assembled from an answer; None if its policy leaves answers alone."""
        rules = self._compiled.choose(tenant, labels).output
        return None if rules is None else AssembledFilter(rules)

    def answer(self, inspection: "RequestInspection", system: str) -> OutputFilter | None:
        """Return the filter of the answer to a request; None if its policy leaves answers alone.

        Args:
            inspection: of the prompt, with all its texts done.
            system: system message as the model gets it.
        """
        rules = inspection.compiled.output
        if rules is None:
            return None
        trial = self._compiled.trial
        trial_output = None if trial is None or trial.policy is inspection.policy else trial.output
        return OutputFilter(rules, inspection.placeholders, system, trial_output, self.dry_run)


class RequestInspection:
    """The texts of one request. They share placeholders: the same value reads the same in every turn.

    Attributes:
        compiled: the policy that decides, compiled.
        policy: the policy as configured.
        texts: the texts as they came.
        checks: decisions about token classifiers, for the record.
        entities: entities that `decide` got.
        inspected: results of `decide`, one for each text.
        verdict: verdict of `decide`.
    """

    inspected: Sequence[InspectedText]
    verdict: PromptVerdict

    def __init__(self, compiled: CompiledPolicy, texts: Sequence[str]) -> None:
        self.compiled = compiled
        self.policy = compiled.policy
        self.texts = tuple(texts)
        self.checks: Sequence[Decided] = ()
        self.entities = NO_ENTITIES
        self._longest = self.policy.settings.max_chars
        self._normalized = [
            normalize(text) if len(text) <= self._longest else self._too_long(text)
            for text in texts
        ]
        self._placeholders: Placeholders | None = None

    @property
    def entity_guards(self) -> list[EntityGuard]:
        """Token classifiers that read prompts."""
        guards = self.compiled.entity_guards
        return [guard for guard in guards if "input" in guard.settings.checks]

    def placeholders(self) -> Placeholders:
        """Return the placeholders of the values redacted so far."""
        if self._placeholders is None:
            self._placeholders = Placeholders(self.normalized)
        return self._placeholders

    @property
    def normalized(self) -> list[str]:
        """Texts for token classifiers; empty where a text is over the length limit."""
        return [normalized.text for normalized in self._normalized]

    def decide(self, entities: EntityResults) -> None:
        """Inspect all texts; `entities` are what token classifiers found in them."""
        self.entities, self.inspected = entities, list(self.results(entities))
        self.verdict = verdict_on(self.inspected, entities.failed)

    def results(self, entities: EntityResults = NO_ENTITIES) -> Iterator[InspectedText]:
        """Yield the result for each text, in order; each step is one text's work."""
        by_text = entities.by_text or [()] * len(self.texts)
        texts = zip(self.texts, self._normalized, by_text, strict=True)
        for original, normalized, entity_findings in texts:
            findings = self._findings_in(normalized.text)
            if entity_findings:
                lists = self.compiled.rules.lists
                findings.update(lists.without_allowed(normalized.text, entity_findings))
            if findings or normalized.findings:
                yield self._decided(original, normalized, findings)
            else:
                yield InspectedText(normalized.text, normalized.text)

    def _too_long(self, text: str) -> Normalized:
        """Return the finding for a text over the limit, which is not inspected and so costs nothing."""
        too_long = Finding(TOO_LONG, self._longest, len(text), Severity.CRITICAL)
        return Normalized("", (too_long,))

    def _findings_in(self, text: str) -> set[Finding]:
        """Return the findings in `text`, and injections that only its look shows."""
        if not self.policy.settings.enabled:
            return set()
        findings = set(self.compiled.rules.scan(text))
        # Look-alikes matter for injections alone; numbers and keys are read as they are.
        if not text.isascii():
            look = Skeleton(text)
            for finding in self.compiled.rules.scan(look.text) if look.text != text else ():
                if finding.rule.startswith("injection."):
                    start, end = look.original_span(finding.start, finding.end)
                    findings.add(Finding(finding.rule, start, end, finding.severity))
        return findings

    def _decided(
        self, original: str, normalized: Normalized, findings: set[Finding]
    ) -> InspectedText:
        decision = apply(self.policy.actions, normalized.text, findings, self.placeholders())
        actions = []
        for taken in decision.taken:
            start, end = normalized.original_span(taken.start, taken.end)
            actions.append(replace(taken, start=start, end=end))
        actions += map(self._noticed, (*normalized.findings, *self._hidden(original)))
        actions.sort(key=BY_PLACE)
        return InspectedText(normalized.text, decision.text, tuple(actions))

    def _hidden(self, original: str) -> Iterator[Finding]:
        if len(original) <= self._longest and self.policy.settings.enabled:
            for start, end, payload in smuggled(original):
                yield from self.compiled.rules.scan_hidden(payload, HIDDEN, (start, end))

    def _noticed(self, finding: Finding) -> TakenAction:
        """Return the action on a finding of normalization, which has edited the text already.

        It may still block or route the request.
        """
        taken = self.policy.actions.action_on(finding)
        action = taken.action
        if action not in (Action.ROUTE, Action.BLOCK):
            noticed = Action.ALLOW if action is Action.ALLOW else Action.FLAG
            action = noticed if finding.rule in _NOTICED else Action.REMOVE
        return replace(taken, action=action)


def _outcome(inspected: InspectedText) -> tuple[str, tuple[str, ...], str | None]:
    verdict = verdict_on([inspected])
    return inspected.text, verdict.blocked, verdict.route.model if verdict.route else None
