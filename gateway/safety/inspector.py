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
from gateway.safety.dry_run import DryRun, Move, moves_of
from gateway.safety.findings import BY_PLACE, Finding, Severity
from gateway.safety.guards.checks import Decided
from gateway.safety.output.assembled import AssembledFilter
from gateway.safety.output.filter import OutputFilter
from gateway.safety.policy import HIDDEN, SafetyPolicies, SafetyPolicy
from gateway.safety.text.edited_text import Normalized
from gateway.safety.text.invisible import smuggled
from gateway.safety.text.normalize import normalize
from gateway.safety.text.skeleton import Skeleton

TOO_LONG: Final = "limit.length"
"""Rule that reports a text too long to be inspected."""
_NOTICED: Final = frozenset({TOO_LONG, "unicode.invisible_only"})
"""Rules of normalization that do not change the text."""


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
        governed: model that must answer by the policy, and the rule that asked for it, if there is one.
    """

    blocked: tuple[str, ...]
    route: TakenAction | None
    taken: Mapping[tuple[str, Action], int]
    governed: tuple[str, str] | None = None


_NO_FINDINGS: Final = PromptVerdict((), None, {})


def verdict_on(
    texts: Sequence[Sequence[TakenAction]], failed: Sequence[tuple[str, Action]] = ()
) -> PromptVerdict:
    """Decide about the findings in each text of one request; `failed` as in `EntityResults`."""
    findings = [taken for text in texts for taken in text]
    actions = [*((taken.rule, taken.action) for taken in findings), *failed]
    blocked = dict.fromkeys(rule for rule, action in actions if action is Action.BLOCK)
    routes = [taken for taken in findings if taken.action is Action.ROUTE]
    route = max(routes, key=lambda taken: taken.severity, default=None)
    governed = (route.model, route.rule) if route is not None and route.model is not None else None
    return PromptVerdict(tuple(blocked), route, Counter(actions), governed)


class Inspector:
    """The policies of one configuration.

    `rehearse` may run in other threads; everything else belongs to the event loop.

    Attributes:
        dry_run: counts of the policy in dry run, if there is one.
    """

    def __init__(self, policies: SafetyPolicies, before: "Inspector | None" = None) -> None:
        """Continue the dry run of `before`, the inspector that this one replaces, if its policy is unchanged."""
        self._policies = policies
        trial, counts = policies.trial, before.dry_run if before else None
        # Counts of another policy say nothing about this one.
        if trial is None or counts is None or counts.policy != trial.version:
            counts = None if trial is None else DryRun(trial.version)
        self.dry_run: DryRun | None = counts

    @property
    def versions(self) -> list[str]:
        """Versions of its policies."""
        return sorted(policy.version for policy in self._policies.by_name.values())

    def choose(self, tenant: str, labels: Mapping[str, str]) -> SafetyPolicy:
        """Return the policy of a request: that of the first matching rule, else the default."""
        settings = self._policies.settings
        rules = (rule.policy for rule in settings.choose if rule.holds(tenant, labels))
        return self._policies.by_name[next(rules, settings.default)]

    def rehearse(self, inspection: "RequestInspection") -> "RequestInspection | None":
        """Inspect the texts of `inspection` by the policy in dry run; return None if there is none.

        The policy in dry run decides about the entities that the active policy's classifiers found;
        its own are not run.
        """
        trial = self._trial_of(inspection)
        if trial is None:
            return None
        rehearsal = RequestInspection(trial, inspection.texts)
        rehearsal.decide(inspection.entities)
        return rehearsal

    def count(
        self, inspection: "RequestInspection", rehearsal: "RequestInspection | None"
    ) -> Counter[Move]:
        """Count the differences between the active policy and the one in dry run, and return them."""
        total: Counter[Move] = Counter()
        if rehearsal is None or self.dry_run is None:
            return total
        active, trial = inspection.results, rehearsal.results
        for (text, taken), (trial_text, trial_taken) in zip(active, trial, strict=True):
            moves = moves_of(taken, trial_taken)
            self.dry_run.add(moves, _outcome(text, taken) != _outcome(trial_text, trial_taken))
            total += moves
        return total

    def assembled(self, tenant: str, labels: Mapping[str, str]) -> AssembledFilter | None:
        """Return the filter of what is assembled from an answer; None if its policy leaves answers alone."""
        rules = self.choose(tenant, labels).output
        return None if rules is None else AssembledFilter(rules)

    def answer(self, inspection: "RequestInspection", system: str) -> OutputFilter | None:
        """Return the filter of the answer to a request; None if its policy leaves answers alone.

        Args:
            inspection: of the prompt, with all its texts done.
            system: system message as the model gets it.
        """
        rules, trial = inspection.policy.output, self._trial_of(inspection)
        if rules is None:
            return None
        trial_rules = None if trial is None else trial.output
        return OutputFilter(rules, inspection.placeholders, system, trial_rules, self.dry_run)

    def _trial_of(self, inspection: "RequestInspection") -> SafetyPolicy | None:
        """Return the policy in dry run, unless it decides about the request anyway."""
        trial = self._policies.trial
        return None if trial is inspection.policy else trial


class RequestInspection:
    """The texts of one request. They share placeholders: the same value reads the same in every turn.

    May be made and decided in other threads.

    Attributes:
        policy: the policy that decides.
        texts: the texts as they came.
        normalized: texts for token classifiers; empty where a text is over the length limit.
        placeholders: placeholders of the values redacted so far.
        checks: decisions about token classifiers, for the record.
        entities: entities that `decide` got.
        edited: the texts for the model.
        taken: findings in each text with their actions, by place.
        verdict: verdict of `decide`.
    """

    edited: Sequence[str]
    taken: Sequence[Sequence[TakenAction]]
    verdict: PromptVerdict

    def __init__(self, policy: SafetyPolicy, texts: Sequence[str]) -> None:
        """Normalize the texts of a request."""
        self.policy = policy
        self.texts = tuple(texts)
        self.checks: Sequence[Decided] = ()
        self.entities = NO_ENTITIES
        self._changes = list(map(self._normalized, self.texts))
        self.normalized = [change.text for change in self._changes]
        self.placeholders = Placeholders(self.normalized)

    @property
    def results(self) -> Iterator[tuple[str, Sequence[TakenAction]]]:
        """Each text for the model, with its findings."""
        return zip(self.edited, self.taken, strict=True)

    def decide(self, entities: EntityResults = NO_ENTITIES) -> None:
        """Inspect all texts; `entities` are what token classifiers found in them."""
        rules, edited, taken = self.policy.rules, [], []
        for index, text in enumerate(self.normalized):
            findings: set[Finding] = set()
            if self.policy.settings.enabled:
                findings.update(rules.scan(text))
                # Look-alikes matter for injections alone; numbers and keys are read as they are.
                if not text.isascii():
                    findings.update(self._look_alikes(text))
            if entities.by_text:
                findings.update(rules.lists.without_allowed(text, entities.by_text[index]))
            shown, actions = self._decided(index, findings)
            edited.append(shown)
            taken.append(actions)
        self.entities, self.edited, self.taken = entities, edited, taken
        is_clean = not entities.failed and not any(taken)
        self.verdict = _NO_FINDINGS if is_clean else verdict_on(taken, entities.failed)

    def _normalized(self, text: str) -> Normalized:
        """Normalize `text`; one over the limit is not inspected and so costs nothing."""
        longest = self.policy.settings.max_chars
        if len(text) <= longest:
            return normalize(text)
        return Normalized("", (Finding(TOO_LONG, longest, len(text), Severity.CRITICAL),))

    def _look_alikes(self, text: str) -> Iterator[Finding]:
        """Yield the injections in `text` that only its look shows."""
        look = Skeleton(text)
        for finding in self.policy.rules.scan(look.text) if look.text != text else ():
            if finding.rule.startswith("injection."):
                start, end = look.original_span(finding.start, finding.end)
                yield Finding(finding.rule, start, end, finding.severity)

    def _decided(self, index: int, findings: set[Finding]) -> tuple[str, tuple[TakenAction, ...]]:
        """Return a text for the model, and its findings with their actions."""
        original, normalized = self.texts[index], self._changes[index]
        # Normalization looked at the text and noticed nothing.
        if not findings and not normalized.findings:
            return normalized.text, ()
        decision = apply(self.policy.actions, normalized.text, findings, self.placeholders)
        actions = []
        for taken in decision.taken:
            start, end = normalized.original_span(taken.start, taken.end)
            actions.append(replace(taken, start=start, end=end))
        # What normalization removed is searched as well: invisible characters can spell a text.
        actions += map(self._noticed, (*normalized.findings, *self._hidden(original)))
        actions.sort(key=BY_PLACE)
        return decision.text, tuple(actions)

    def _hidden(self, original: str) -> Iterator[Finding]:
        if len(original) <= self.policy.settings.max_chars and self.policy.settings.enabled:
            for start, end, payload in smuggled(original):
                yield from self.policy.rules.scan_hidden(payload, HIDDEN, (start, end))

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


def _outcome(
    text: str, taken: Sequence[TakenAction]
) -> tuple[str, tuple[str, ...], tuple[str, str] | None]:
    verdict = verdict_on([taken])
    return text, verdict.blocked, verdict.governed
