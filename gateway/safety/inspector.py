"""Inspection of a prompt (normalize, search, decide) and of its answer.

The model gets the normalized text, edited by the policy. Rules search three views: the normalized
text, its skeleton (for injections only, where letters are replaced by look-alikes) and what
invisible characters of the original spell. Every finding has offsets in the original text.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from gateway.safety.findings import (
    BY_PLACE,
    Action,
    DryRun,
    Finding,
    Move,
    Placeholders,
    Severity,
    TakenAction,
    apply,
    moves_of,
)
from gateway.safety.guards.checks import Decided
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.redactor import AssembledFilter
from gateway.safety.policy import HIDDEN, SafetyPolicies, SafetyPolicy
from gateway.safety.text.edited_text import EditedText
from gateway.safety.text.invisible import smuggled
from gateway.safety.text.normalize import NOT_PLAIN_ASCII, normalize
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


class Inspector:
    """The policies of one configuration.

    `choose` and `rehearse` may run in other threads; `count` and the filters belong to the event loop.

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
        trial = self._trial_of(inspection.policy)
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
        active, trial = (
            zip(result.edited, result.actions, strict=True) for result in (inspection, rehearsal)
        )
        for now, then in zip(active, trial, strict=True):
            moves = moves_of(now[1], then[1])
            self.dry_run.add(moves, _outcome(*now) != _outcome(*then))
            total += moves
        return total

    def assembled(self, tenant: str, labels: Mapping[str, str]) -> AssembledFilter | None:
        """Return the filter of what is assembled from an answer; None if its policy leaves answers alone."""
        rules = self.choose(tenant, labels).output
        return None if rules is None else AssembledFilter(rules)

    def answer(
        self,
        policy: SafetyPolicy,
        placeholders: Placeholders | None,
        texts: Sequence[str],
        system: str,
    ) -> OutputFilter | None:
        """Return the filter of the answer to a request; None if its policy leaves answers alone.

        Args:
            policy: of the request.
            placeholders: of the prompt, if something was found in it.
            texts: of the prompt, as the model gets them.
            system: the system message among them.
        """
        rules, trial = policy.output, self._trial_of(policy)
        if rules is None:
            return None
        trial_rules = None if trial is None else trial.output
        return OutputFilter(
            rules, placeholders or Placeholders(texts), system, trial_rules, self.dry_run
        )

    def _trial_of(self, policy: SafetyPolicy) -> SafetyPolicy | None:
        """Return the policy in dry run, unless it is the one that decides."""
        trial = self._policies.trial
        return None if trial is policy else trial


class RequestInspection:
    """The texts of one request, and what the policy decides about all of them together.

    The texts share placeholders: the same value reads the same in every turn. May be made and
    decided in other threads. `decide` sets `edited`, `actions` and all that follows from them.

    Attributes:
        policy: the policy that decides.
        texts: the texts as they came.
        normalized: texts for rules and token classifiers; empty where a text is over the length limit.
        checks: decisions about token classifiers, for the record.
        entities: entities that `decide` got.
        edited: the texts for the model.
        actions: findings in each text with their actions, by place.
        placeholders: of the values redacted so far; None before something was found.
        blocked: names of the rules that block, each once.
        route: the most severe finding that routes.
        governed: model that must answer by the policy, and the rule that asked for it, if there is one.
        counts: count of findings by rule and action.
    """

    edited: list[str]
    actions: Sequence[Sequence[TakenAction]]
    placeholders: Placeholders | None = None
    blocked: tuple[str, ...] = ()
    route: TakenAction | None = None
    governed: tuple[str, str] | None = None
    counts: Mapping[tuple[str, Action], int] = MappingProxyType({})

    def __init__(self, policy: SafetyPolicy, texts: Sequence[str]) -> None:
        """Normalize the texts of a request."""
        self.policy = policy
        self.texts = tuple(texts)
        self.checks: Sequence[Decided] = ()
        self.entities = NO_ENTITIES
        self.normalized = list(texts)
        self._changed: dict[int, EditedText] = {}
        """What normalization has changed or noticed, by the index of the text."""
        for index, text in enumerate(texts):
            is_short = len(text) <= policy.settings.max_chars
            if is_short and text.isascii() and not NOT_PLAIN_ASCII.search(text):
                continue
            change = self._normalize(text)
            if change.findings or change.text != text:
                self._changed[index], self.normalized[index] = change, change.text

    def decide(self, entities: EntityResults = NO_ENTITIES) -> None:
        """Inspect all texts; `entities` are what token classifiers found in them."""
        rules, actions = self.policy.rules, list[Sequence[TakenAction]]()
        self.entities, self.edited, self.actions = entities, self.normalized.copy(), actions
        for index, text in enumerate(self.normalized):
            findings: set[Finding] = set()
            if self.policy.settings.enabled:
                findings.update(rules.scan(text))
                # Look-alikes matter for injections alone; numbers and keys are read as they are.
                if not text.isascii():
                    findings.update(self._look_alikes(text))
            if entities.by_text:
                findings.update(rules.lists.without_allowed(text, entities.by_text[index]))
            is_clean = not findings and index not in self._changed
            actions.append(() if is_clean else self._decided(index, findings))
        if any(actions) or entities.failed:
            self._sum_up([finding for text_actions in actions for finding in text_actions])

    def _sum_up(self, actions: Sequence[TakenAction]) -> None:
        """Decide about all texts together."""
        self.counts = Counter(
            [*((finding.rule, finding.action) for finding in actions), *self.entities.failed]
        )
        self.blocked = tuple(
            dict.fromkeys(rule for rule, action in self.counts if action is Action.BLOCK)
        )
        self.route = route = route_of(actions)
        if route is not None and route.model is not None:
            self.governed = route.model, route.rule

    def _look_alikes(self, text: str) -> Iterator[Finding]:
        """Yield the injections in the skeleton of `text`; none if it reads like `text`."""
        look = Skeleton(text)
        for finding in self.policy.rules.scan(look.text) if look.text != text else ():
            if finding.rule.startswith("injection."):
                start, end = look.original_span(finding.start, finding.end)
                yield replace(finding, start=start, end=end)

    def _normalize(self, text: str) -> EditedText:
        """Normalize `text`; one over the limit is not inspected and so costs nothing."""
        longest = self.policy.settings.max_chars
        if len(text) <= longest:
            return normalize(text)
        change = EditedText(text)
        change.flag(TOO_LONG, longest, len(text), Severity.CRITICAL)
        change.remove([(0, len(text))])
        return change

    def _decided(self, index: int, findings: set[Finding]) -> Sequence[TakenAction]:
        """Set a text for the model, and return its findings with their actions."""
        original = self.texts[index]
        change = self._changed.get(index) or EditedText(original)
        self.placeholders = self.placeholders or Placeholders(self.normalized)
        decision = apply(self.policy.actions, change.text, findings, self.placeholders)
        self.edited[index] = decision.text
        actions = []
        for finding in decision.actions:
            start, end = change.original_span(finding.start, finding.end)
            actions.append(replace(finding, start=start, end=end))
        # What normalization removed is searched as well: invisible characters can spell a text.
        actions += map(self._noticed, (*change.findings, *self._hidden(original)))
        return tuple(sorted(actions, key=BY_PLACE))

    def _hidden(self, original: str) -> Iterator[Finding]:
        if len(original) <= self.policy.settings.max_chars and self.policy.settings.enabled:
            for start, end, payload in smuggled(original):
                yield from self.policy.rules.scan_hidden(payload, HIDDEN, (start, end))

    def _noticed(self, finding: Finding) -> TakenAction:
        """Return the action on a finding of normalization, which has edited the text already.

        It may still block or route the request.
        """
        result = self.policy.actions.action_on(finding)
        if result.action in (Action.ROUTE, Action.BLOCK):
            return result
        noticed = Action.ALLOW if result.action is Action.ALLOW else Action.FLAG
        return replace(result, action=noticed if finding.rule in _NOTICED else Action.REMOVE)


def route_of(actions: Iterable[TakenAction]) -> TakenAction | None:
    """Return the most severe finding that routes, with the model that must answer."""
    routes = (finding for finding in actions if finding.action is Action.ROUTE)
    return max(routes, key=lambda finding: finding.severity, default=None)


def _outcome(text: str, actions: Sequence[TakenAction]) -> object:
    """Return what a caller would notice of the decision about `text`."""
    blocked = [finding.rule for finding in actions if finding.action is Action.BLOCK]
    route = route_of(actions)
    return text, list(dict.fromkeys(blocked)), route and (route.model, route.rule)
