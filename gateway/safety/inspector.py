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
from gateway.safety.guards.checks import Decided
from gateway.safety.output.assembled import AssembledFilter
from gateway.safety.output.filter import OutputFilter
from gateway.safety.text.edited_text import Normalized
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


_NOTHING: Final[tuple[TakenAction, ...]] = ()
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

    def __init__(self, compiled: CompiledPolicies, before: "Inspector | None" = None) -> None:
        """Continue the dry run of `before`, the inspector that this one replaces, if its policy is unchanged."""
        self._compiled = compiled
        trial, counts = compiled.trial, before.dry_run if before else None
        # Counts of another policy say nothing about this one.
        if trial is None or counts is None or counts.policy != trial.policy.version:
            counts = None if trial is None else DryRun(trial.policy.version)
        self.dry_run: DryRun | None = counts

    @property
    def versions(self) -> list[str]:
        """Versions of its policies."""
        return sorted(compiled.policy.version for compiled in self._compiled.by_name.values())

    def choose(self, tenant: str, labels: Mapping[str, str]) -> CompiledPolicy:
        """Return the policy of a request: that of the first matching rule, else the default."""
        settings = self._compiled.settings
        for rule in settings.choose:
            if rule.holds(tenant, labels):
                return self._compiled.by_name[rule.policy]
        return self._compiled.by_name[settings.default]

    def rehearse(self, inspection: "RequestInspection") -> "RequestInspection | None":
        """Inspect the texts of `inspection` by the policy in dry run; return None if there is none.

        The policy in dry run decides about the entities that the active policy's classifiers found;
        its own are not run.
        """
        trial = self._compiled.trial
        if trial is None or trial.policy is inspection.policy:
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
        rules = inspection.compiled.output
        if rules is None:
            return None
        trial = self._compiled.trial
        trial_output = None if trial is None or trial.policy is inspection.policy else trial.output
        return OutputFilter(rules, inspection.placeholders, system, trial_output, self.dry_run)


class RequestInspection:
    """The texts of one request. They share placeholders: the same value reads the same in every turn.

    May be made and decided in other threads.

    Attributes:
        compiled: the policy that decides, compiled.
        policy: the policy as configured.
        texts: the texts as they came.
        normalized: texts for token classifiers; empty where a text is over the length limit.
        checks: decisions about token classifiers, for the record.
        entities: entities that `decide` got.
        edited: the texts for the model.
        taken: findings in each text with their actions, by place.
        verdict: verdict of `decide`.
    """

    edited: Sequence[str]
    taken: Sequence[Sequence[TakenAction]]
    verdict: PromptVerdict

    def __init__(self, compiled: CompiledPolicy, texts: Sequence[str]) -> None:
        """Normalize the texts of a request."""
        self.compiled = compiled
        self.policy = compiled.policy
        self.texts = tuple(texts)
        self.checks: Sequence[Decided] = ()
        self.entities = NO_ENTITIES
        self.normalized: list[str] = []
        self._changes: dict[int, Normalized] = {}
        """By the number of a text, where it may differ from what came."""
        self._placeholders: Placeholders | None = None
        for index, text in enumerate(self.texts):
            changed = text
            if (
                len(text) > compiled.policy.settings.max_chars
                or not text.isascii()
                or NOT_PLAIN_ASCII.search(text)
            ):
                self._changes[index] = change = self._normalized(text)
                changed = change.text
            self.normalized.append(changed)

    def placeholders(self) -> Placeholders:
        """Return the placeholders of the values redacted so far."""
        if self._placeholders is None:
            self._placeholders = Placeholders(self.normalized)
        return self._placeholders

    @property
    def results(self) -> Iterator[tuple[str, Sequence[TakenAction]]]:
        """Each text for the model, with its findings."""
        return zip(self.edited, self.taken, strict=True)

    def decide(self, entities: EntityResults = NO_ENTITIES) -> None:
        """Inspect all texts; `entities` are what token classifiers found in them."""
        compiled, edited, taken = self.compiled, [], []
        for index, text in enumerate(self.normalized):
            findings: set[Finding] = set()
            if self.policy.settings.enabled:
                findings.update(compiled.rules.scan(text))
                # Look-alikes matter for injections alone; numbers and keys are read as they are.
                if not text.isascii():
                    findings.update(self._look_alikes(text))
            if entities.by_text:
                lists = compiled.rules.lists
                findings.update(lists.without_allowed(text, entities.by_text[index]))
            shown, actions = text, _NOTHING
            if findings or index in self._changes:
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
        for finding in self.compiled.rules.scan(look.text) if look.text != text else ():
            if finding.rule.startswith("injection."):
                start, end = look.original_span(finding.start, finding.end)
                yield Finding(finding.rule, start, end, finding.severity)

    def _decided(self, index: int, findings: set[Finding]) -> tuple[str, tuple[TakenAction, ...]]:
        """Return a text for the model, and its findings with their actions."""
        original, text = self.texts[index], self.normalized[index]
        normalized = self._changes.get(index, Normalized(text, ()))
        # Normalization looked at the text and changed nothing.
        if not findings and not normalized.findings:
            return text, _NOTHING
        decision = apply(self.policy.actions, text, findings, self.placeholders())
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


def _outcome(
    text: str, taken: Sequence[TakenAction]
) -> tuple[str, tuple[str, ...], tuple[str, str] | None]:
    verdict = verdict_on([taken])
    return text, verdict.blocked, verdict.governed
