"""Findings of inspection, and the actions on them. One function, `apply`, decides for prompts and answers alike.

A finding has a rule, a span and a severity, never the text itself.

Overlapping findings that edit the text (remove, redact, block) are decided together, so that no
part of one remains visible: the union of their spans gets the strongest of their actions. Of
several findings with that action the most severe names the placeholder, then the longest, then the
first, then the first by name. The order in which they were found does not matter.

A redacted value gets a placeholder, such as `<EMAIL_1>`. One `Placeholders` belongs to one request.
It follows from the texts of the prompt alone, so a resumed call with the same prompt gets the same
placeholders. It contains the redacted values: it is never logged and never leaves the gateway.

A dry run counts where a new policy would decide differently from the active one (`DryRun`).
"""

import enum
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final


class Severity(enum.IntEnum):
    """Severity of a finding; policies set actions from a severity upwards."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """A span of a text that a rule reports."""

    rule: str
    """Name of the rule, such as "pii.iban", "secret.aws_access_key", "unicode.tag" or
    "injection.override".
    """
    start: int
    """Offset of the first character in the inspected text."""
    end: int
    """Offset behind the last character."""
    severity: Severity

    @property
    def span(self) -> tuple[int, int]:
        """Place of the finding: start and end."""
        return self.start, self.end


BY_PLACE: Final = attrgetter("start", "end", "rule")
"""Sort key of findings, indicators and taken actions: by place, then by rule."""


class Action(enum.IntEnum):
    """The action on a finding; of two the higher one wins."""

    ALLOW = 0
    FLAG = 1
    ROUTE = 2
    REMOVE = 3
    REDACT = 4
    BLOCK = 5


_EDITS: Final = frozenset({Action.REMOVE, Action.REDACT, Action.BLOCK})


@dataclass(frozen=True, slots=True)
class Choice:
    """An action, with the target model of a ROUTE."""

    action: Action
    model: str | None = None


@dataclass(frozen=True, slots=True)
class TakenAction(Finding):
    """A finding with the action taken; in `RequestInspection.actions` its offsets are those of the original text.

    Attributes:
        model: governed model of a ROUTE.
    """

    action: Action
    model: str | None = None


@dataclass(frozen=True)
class ActionTable:
    """Maps findings to actions.

    The first of these that is set decides:

    1. the rule by its full name;
    2. the longest fitting prefix such as `pii.*` (`*` fits all);
    3. the highest severity threshold that the finding reaches;
    4. the default.
    """

    rules: Mapping[str, Choice] = field(default_factory=dict)
    severities: Mapping[Severity, Choice] = field(default_factory=dict)
    default: Choice = Choice(Action.FLAG)

    def choose(self, rule: str, severity: Severity) -> Choice:
        """Return the action for a finding of `rule`."""
        # A name decides before a severity: an operator who names a rule means it at any severity.
        named = self.rules.get(rule) or self._by_prefix(rule)
        if named is not None:
            return named
        reached = [threshold for threshold in self.severities if threshold <= severity]
        return self.severities[max(reached)] if reached else self.default

    def action_on(self, finding: Finding) -> TakenAction:
        """Return `finding` with its action."""
        rule, severity = finding.rule, finding.severity
        choice = self.choose(rule, severity)
        return TakenAction(rule, *finding.span, severity, choice.action, choice.model)

    def edits(self, rule: str) -> bool:
        """Return whether a finding of `rule` can change or end a text, at any severity."""
        return any(self.choose(rule, severity).action in _EDITS for severity in Severity)

    def _by_prefix(self, rule: str) -> Choice | None:
        parts = rule.split(".")
        for length in range(len(parts) - 1, -1, -1):
            choice = self.rules.get(".".join([*parts[:length], "*"]))
            if choice is not None:
                return choice
        return None


_SHAPE: Final = re.compile(r"<[A-Z][A-Z0-9_]{0,63}_[0-9]{1,9}>")
_FIXED: Final[Mapping[str, str]] = {"output.system_echo": "<SYSTEM_PROMPT>"}
"""Placeholders without a number, by rule: of values that never return."""
_NO_NAME: Final = re.compile(r"[^A-Z0-9]+")


class Placeholders:
    """The placeholders of one request: equal values get the same one, and none occurs in the prompt.

    Attributes:
        values: value of each placeholder.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Reserve whatever looks like a placeholder in `texts`, all texts of the prompt before redaction."""
        self._reserved = frozenset(shape for text in texts for shape in _SHAPE.findall(text))
        self._by_value: dict[tuple[str, str], str] = {}
        self.values: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def of(self, rule: str, value: str) -> str:
        """Return the placeholder of a `value` that `rule` found; make a new one if there is none."""
        if rule in _FIXED:
            return _FIXED[rule]
        kind = kind_of(rule)
        placeholder = self._by_value.get((kind, value))
        if placeholder is None:
            placeholder = self._by_value[kind, value] = self._new(kind)
            self.values[placeholder] = value
        return placeholder

    def restore(self, text: str) -> str:
        """Return `text` with the values in place of their placeholders. Values are not searched again."""
        return _SHAPE.sub(lambda match: self.values.get(match[0], match[0]), text)

    def for_answer(self) -> "Placeholders":
        """Return a copy for the answer: values added to the copy cannot be restored from this one."""
        return deepcopy(self)

    def _new(self, kind: str) -> str:
        while True:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            placeholder = f"<{kind}_{number}>"
            # The caller may have written such a word: it must not turn into somebody's value.
            if placeholder not in self._reserved:
                return placeholder


def kind_of(rule: str) -> str:
    """Return the word for a placeholder, the last part of a rule's name: "pii.us_ssn" gives "US_SSN"."""
    name = _NO_NAME.sub("_", rule.rpartition(".")[2].upper()).strip("_")[:48]
    return name if name[:1].isalpha() else f"VALUE_{name}".rstrip("_")


@dataclass(frozen=True, slots=True)
class Edit:
    """The replacement of one span of the text.

    Attributes:
        start: offset of the first character, before any edit.
        end: offset behind the last character.
        action: REMOVE, REDACT or BLOCK; the text ends before a BLOCK.
        replacement: what the answer or prompt shows instead.
    """

    start: int
    end: int
    action: Action
    replacement: str


@dataclass
class TextDecision:
    """The result for one text.

    Attributes:
        actions: every finding with its action, in the order of the text.
        text: the edited text, which ends before the first block.
        edits: replacements in the inspected text, in order; none follows a block.
    """

    actions: tuple[TakenAction, ...]
    text: str
    edits: tuple[Edit, ...] = ()

    @property
    def blocked(self) -> tuple[str, ...]:
        """Rules that block, in order, each once."""
        rules = (finding.rule for finding in self.actions if finding.action is Action.BLOCK)
        return tuple(dict.fromkeys(rules))


def apply(
    table: ActionTable,
    text: str,
    findings: Iterable[Finding],
    placeholders: Placeholders | None = None,
) -> TextDecision:
    """Apply the policy to `text`. The same findings in any order give the same decision.

    Args:
        table: actions of the policy.
        text: the inspected text.
        findings: findings in it.
        placeholders: of the request; new ones are added. None: those of `text` alone, dropped afterwards.
    """
    ordered = sorted(set(findings), key=lambda f: (f.start, f.end, f.rule, f.severity))
    if not ordered:
        return TextDecision((), text)
    actions = tuple(map(table.action_on, ordered))
    edits = _edits(actions, text, placeholders or Placeholders((text,)))
    return TextDecision(actions, edited(text, edits), tuple(edits))


def edited(text: str, edits: Sequence[Edit]) -> str:
    """Return `text` with `edits`; it ends before the first that blocks."""
    parts, at = [], 0
    for edit in edits:
        parts.append(text[at : edit.start])
        # Nothing behind a block is shown.
        if edit.action is Action.BLOCK:
            return "".join(parts)
        parts.append(edit.replacement)
        at = edit.end
    return "".join((*parts, text[at:]))


def clusters(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the unions of overlapping `spans`, in order.

    Spans that only touch stay apart; empty ones are left out.
    """
    unions: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if unions and start < unions[-1][1]:
            unions[-1] = (unions[-1][0], max(end, unions[-1][1]))
        else:
            unions.append((start, end))
    return unions


def _edits(actions: Sequence[TakenAction], text: str, placeholders: Placeholders) -> list[Edit]:
    # An empty finding edits nothing, so it decides nothing about the others either.
    editing = deque(f for f in actions if f.action in _EDITS and f.start < f.end)
    edits = []
    # Overlapping findings are edited together, or part of one would stay beside the placeholder.
    for start, end in clusters((finding.start, finding.end) for finding in editing):
        members = []
        while editing and editing[0].start < end:
            members.append(editing.popleft())
        winner = min(members, key=_rank)
        is_redacted = winner.action is Action.REDACT
        replacement = placeholders.of(winner.rule, text[start:end]) if is_redacted else ""
        edits.append(Edit(start, end, winner.action, replacement))
        if winner.action is Action.BLOCK:
            break
    return edits


def _rank(match: TakenAction) -> tuple[int, int, int, int, str]:
    return -match.action, -match.severity, match.start - match.end, match.start, match.rule


# Dry run of a new policy.

Move = tuple[str, Action | None, Action | None]
"""Rule, action of the active policy, action of the policy in dry run; None where only the other policy
finds it.
"""


def moves_of(active: Iterable[TakenAction], trial: Iterable[TakenAction]) -> Counter[Move]:
    """Count the findings of one text that two policies treat differently."""
    before, after = _by_place(active), _by_place(trial)
    moves = ((place[0], before.get(place), after.get(place)) for place in {**before, **after})
    return Counter(move for move in moves if move[1] is not move[2])


def _by_place(actions: Iterable[TakenAction]) -> dict[tuple[str, int, int], Action]:
    return {(finding.rule, finding.start, finding.end): finding.action for finding in actions}


@dataclass
class DryRun:
    """Counts of a policy in dry run, since it was loaded.

    Attributes:
        policy: version of the policy.
        texts: texts of prompts and answers that both policies decided about.
        changed: number of these whose edited text, blocking rules or route would differ.
        moves: findings that the two policies treat differently.
    """

    policy: str
    texts: int = 0
    changed: int = 0
    moves: Counter[Move] = field(default_factory=Counter)

    def add(self, moves: Mapping[Move, int], changed: bool) -> None:
        """Count one text that both policies decided about."""
        self.texts += 1
        self.changed += changed
        self.moves.update(moves)


def move_labels(moves: Iterable[Move]) -> list[str]:
    """Return each difference as "RULE:NOW>THEN", such as "pii.email:flag>redact", in order."""
    names: dict[Action | None, str] = {action: action.name.lower() for action in Action}
    names[None] = "none"
    return sorted(f"{rule}:{names[active]}>{names[trial]}" for rule, active, trial in moves)
