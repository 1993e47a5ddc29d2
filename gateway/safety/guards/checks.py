"""The guard checks of one request: which are due, what waits for them, and the actions on their outcomes.

    begin       checks of the prompt, which run beside the generation
    produced    the answer has grown or ended: checks of it that are due
    decide      an outcome came: the resulting action
    followed    a route was carried out, which takes a moment
    restart     another model answers: verdicts about the first one's answer are dropped

Until every check of the prompt is decided nothing of the answer is shown, and the answer does not
end before every check is. One guard checks one state of an answer at a time; what grows meanwhile
is checked next.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.safety.findings import Action, Finding
from gateway.safety.guards.entities import EntityTags
from gateway.safety.guards.families import Family, GuardFailure, Outcome
from gateway.safety.settings import GuardSettings

RULE: Final = "guard"
PASSED: Final = "pass"


@dataclass(frozen=True)
class GuardModel:
    """A model of a policy that checks prompts or answers."""

    name: str
    settings: GuardSettings


@dataclass(frozen=True)
class Guard(GuardModel):
    """A model that gives verdicts, ready to be queried."""

    family: Family


@dataclass(frozen=True)
class EntityGuard(GuardModel):
    """A token classifier, whose findings are decided together with those of the rules."""

    tags: EntityTags


@dataclass(frozen=True)
class Check:
    """One query to one guard.

    Attributes:
        number: counts the checks of a request.
        in_answer: whether it is about the answer, not the prompt.
        tokens: length of the answer when the check was opened, in tokens; 0 for the prompt.
        answer: text of the answer then; empty for the prompt and for token classifiers.
    """

    number: int
    guard: GuardModel
    in_answer: bool = False
    tokens: int = 0
    answer: str = ""


@dataclass(frozen=True)
class Cost:
    """Cost of a check: time in milliseconds, and money in the currency of the prices."""

    took_ms: float = 0.0
    cost: float = 0.0


@dataclass(frozen=True)
class Decided:
    """A check with its outcome.

    Attributes:
        actions: rules with their actions.
        score: score of the verdict, if it has one.
    """

    check: Check
    actions: tuple[tuple[str, Action], ...]
    score: float | None = None
    cost: Cost = Cost()

    @property
    def action(self) -> Action:
        """The strongest action."""
        return max(action for _, action in self.actions)

    @property
    def rules(self) -> tuple[str, ...]:
        """Rules with that action."""
        return tuple(rule for rule, action in self.actions if action is self.action)


class Checks:
    """The checks of one request.

    Attributes:
        decided: decisions, in the order of their outcomes.
    """

    def __init__(self, guards: Sequence[Guard]) -> None:
        self.decided: list[Decided] = []
        self._guards = guards
        self._pending: dict[int, Check] = {}
        self._count = 0
        self._following: set[int] = set()
        """Numbers of decided checks whose route is still being carried out."""
        self._checked_tokens: dict[str, int] = {}
        """Tokens of the answer at each guard's latest check."""
        self._tokens = 0
        self._ended = False
        self._begun = False
        self._over = False

    @property
    def waits(self) -> bool:
        """Whether the answer must not end yet."""
        if self._over:
            return False
        unfinished = self._pending or self._following or self._uncovered()
        return not self._begun or bool(unfinished)

    @property
    def holds(self) -> bool:
        """Whether nothing may be shown yet."""
        if self._over:
            return False
        prompt_pending = any(not check.in_answer for check in self._pending.values())
        if not self._begun or self._following or prompt_pending:
            return True
        holding = any(guard.settings.hold for guard in self._of_answers())
        return holding and (not self._ended or self.waits)

    def begin(self) -> list[Check]:
        """Open the checks of the prompt."""
        self._begun = True
        due = [guard for guard in self._guards if "input" in guard.settings.checks]
        return [self._open(guard) for guard in due]

    def produced(self, tokens: int, text: Callable[[], str], ended: bool) -> list[Check]:
        """Open the checks that are due now that the answer has `tokens`."""
        if self._over:
            return []
        self._tokens, self._ended = tokens, self._ended or ended
        due = [guard for guard in self._of_answers() if self._due(guard)]
        return [self._open(guard, tokens, text()) for guard in due]

    def decide(self, check: Check, outcome: Outcome, cost: Cost = Cost()) -> Decided | None:
        """Record `outcome` and return the action on it, or None if nobody waits for the check any more."""
        # The request has ended, or another model answers: the verdict is about text that nobody
        # sees.
        if self._over or self._pending.pop(check.number, None) is None:
            return None
        score = None if isinstance(outcome, GuardFailure) else outcome.score
        decided = Decided(check, rules_of(check.guard, outcome), score, cost)
        self.decided.append(decided)
        # The answer waits until the governed model has taken over (`followed`).
        if decided.action is Action.ROUTE:
            self._following.add(check.number)
        return decided

    def reading(self, guard: EntityGuard, tokens: int) -> Check:
        """Open the check of a token classifier that reads a part of the answer, when the answer has `tokens`.

        It is not pending here: its caller adds the decision to `decided`.
        """
        self._count += 1
        return Check(self._count, guard, True, tokens)

    def followed(self, check: Check) -> None:
        """Note that the governed model of `check` answers now, or did already."""
        self._following.discard(check.number)

    def restart(self) -> None:
        """Drop the checks of the answer: another model answers now."""
        self._pending = {
            number: check for number, check in self._pending.items() if not check.in_answer
        }
        self._checked_tokens.clear()
        self._tokens, self._ended = 0, False

    def close(self) -> None:
        """Drop all checks: the request has ended."""
        self._over = True
        self._pending.clear()

    def counts(self, *, in_answer: bool) -> Mapping[tuple[str, Action], int]:
        """Count the actions by rule, of the checks of the answer or of the prompt."""
        decided = [decision for decision in self.decided if decision.check.in_answer is in_answer]
        return Counter(pair for decision in decided for pair in decision.actions)

    def _of_answers(self) -> list[Guard]:
        return [guard for guard in self._guards if "output" in guard.settings.checks]

    def _due(self, guard: Guard) -> bool:
        # One check of a guard at a time; the next one covers what has grown meanwhile.
        if any(check.in_answer and check.guard is guard for check in self._pending.values()):
            return False
        grown = self._tokens - self._checked_tokens.get(guard.name, 0)
        window = guard.settings.window_tokens
        return grown > 0 and (self._ended or 0 < window <= grown)

    def _uncovered(self) -> list[Guard]:
        """Return the guards that have not checked all of the answer."""
        guards = self._of_answers()
        return [guard for guard in guards if self._checked_tokens.get(guard.name, 0) < self._tokens]

    def _open(self, guard: Guard, tokens: int = 0, answer: str = "") -> Check:
        self._count += 1
        check = Check(self._count, guard, tokens > 0, tokens, answer)
        self._pending[check.number] = check
        if check.in_answer:
            self._checked_tokens[guard.name] = tokens
        return check


def rules_of(guard: GuardModel, outcome: Outcome) -> tuple[tuple[str, Action], ...]:
    """Return the rules that an outcome matches, each with the action of the policy."""
    if isinstance(outcome, GuardFailure):
        return (failure_rule_of(guard, outcome),)
    if not outcome.flagged:
        return ((_rule(guard, PASSED), Action.ALLOW),)
    categories, action = guard.settings.categories, guard.settings.action.action
    return tuple(
        (_rule(guard, name), action if not categories or name in categories else Action.FLAG)
        for name in outcome.categories
    )


def failure_rule_of(guard: GuardModel, failure: GuardFailure) -> tuple[str, Action]:
    """Return the rule and the action for a guard that failed."""
    action = Action.BLOCK if guard.settings.fail == "closed" else Action.FLAG
    return _rule(guard, failure), action


def entity_rules_of(
    guard: GuardModel, outcome: Sequence[Sequence[Finding]] | GuardFailure
) -> tuple[tuple[str, Action], ...]:
    """Return the rules of a token classifier's outcome; actions on its findings are decided with those of the rules."""
    if isinstance(outcome, GuardFailure):
        return (failure_rule_of(guard, outcome),)
    entities = (finding.rule.rpartition(".")[2] for findings in outcome for finding in findings)
    names = dict.fromkeys(entities) or {PASSED: None}
    return tuple((_rule(guard, name), Action.ALLOW) for name in names)


def outcome_of(rule: str, guard: str) -> str:
    """Return the outcome of a check from its rule "guard.NAME.OUTCOME"."""
    return rule.removeprefix(f"{RULE}.{guard}.")


def _rule(guard: GuardModel, name: str) -> str:
    return f"{RULE}.{guard.name}.{re.sub(r'[^A-Za-z0-9_-]', '_', name)}"
