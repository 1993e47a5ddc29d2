"""Actions on findings. One pure function, `apply`, decides for prompts and answers alike.

Overlapping findings are decided together, so that no part of one remains visible: the union of their spans gets the
strongest of their actions. Of several findings with that action the most severe names the placeholder, then the
longest, then the first, then the first by name; the order in which they were found does not matter.

A redacted value gets a placeholder, such as ``<EMAIL_1>``. One `Placeholders` belongs to one request. It follows from
the texts of the prompt alone, so a resumed call that brings the same prompt gets the same placeholders. It contains the
redacted values: it is never logged and never leaves the gateway.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from gateway.safety.findings import Finding, Severity


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
class TakenAction:
    """A finding with the action taken.

    Attributes:
        start: first character, an offset into the text that was decided about; of prompts into the original text.
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
class ActionTable:
    """Maps findings to actions.

    In this order: the rule by its full name; the longest prefix such as ``pii.*`` that fits (``*`` fits all); the
    highest severity threshold that the finding reaches; the default.
    """

    rules: Mapping[str, Choice] = field(default_factory=dict)
    severities: Mapping[Severity, Choice] = field(default_factory=dict)
    default: Choice = Choice(Action.FLAG)

    def choose(self, rule: str, severity: Severity) -> Choice:
        """The action for a finding of ``rule``."""
        named = self.rules.get(rule) or self._by_prefix(rule)
        if named is not None:
            return named
        reached = [threshold for threshold in self.severities if threshold <= severity]
        return self.severities[max(reached)] if reached else self.default

    def taken(self, finding: Finding) -> TakenAction:
        """``finding`` with its action."""
        choice = self.choose(finding.rule, finding.severity)
        return TakenAction(
            finding.rule, finding.severity, choice.action, finding.start, finding.end, choice.model
        )

    def edits(self, rule: str) -> bool:
        """Whether a finding of ``rule`` can change or end a text, at any severity."""
        return any(self.choose(rule, severity).action in _EDITS for severity in Severity)

    def _by_prefix(self, rule: str) -> Choice | None:
        parts = rule.split(".")
        for length in range(len(parts) - 1, -1, -1):
            found = self.rules.get(".".join([*parts[:length], "*"]))
            if found is not None:
                return found
        return None


_SHAPE: Final = re.compile(r"<[A-Z][A-Z0-9_]{0,63}_[0-9]{1,9}>")
_NO_NAME: Final = re.compile(r"[^A-Z0-9]+")


class Placeholders:
    """The placeholders of one request: the same value gets the same one, and none is text that the prompt has."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Reserves what looks like a placeholder in ``texts``, all texts of the prompt before any redaction."""
        self._reserved = frozenset(shape for text in texts for shape in _SHAPE.findall(text))
        self._by_value: dict[tuple[str, str], str] = {}
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    @property
    def values(self) -> Mapping[str, str]:
        """What each placeholder stands for."""
        return MappingProxyType(self._values)

    def of(self, rule: str, value: str) -> str:
        """The placeholder of ``value``, which ``rule`` found; a new one when there is none."""
        kind = kind_of(rule)
        known = self._by_value.get((kind, value))
        if known is None:
            known = self._by_value[kind, value] = self._new(kind)
            self._values[known] = value
        return known

    def restore(self, text: str) -> str:
        """``text`` with the values back in the place of the placeholders. Values are not looked into again."""
        return _SHAPE.sub(lambda match: self._values.get(match[0], match[0]), text)

    def for_answer(self) -> "Placeholders":
        """A copy for the answer: values added to the copy cannot be restored from this one."""
        made = copy(self)
        made._by_value, made._values = dict(self._by_value), dict(self._values)
        made._counts = dict(self._counts)
        return made

    def _new(self, kind: str) -> str:
        while True:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            placeholder = f"<{kind}_{number}>"
            if placeholder not in self._reserved:
                return placeholder


def kind_of(rule: str) -> str:
    """The word in a placeholder: the last part of the rule's name, "pii.us_ssn" gives "US_SSN"."""
    name = _NO_NAME.sub("_", rule.rpartition(".")[2].upper()).strip("_")[:48]
    return name if name[:1].isalpha() else f"VALUE_{name}".rstrip("_")


@dataclass(frozen=True, slots=True)
class Edit:
    """The replacement of one span of the text.

    Attributes:
        start: first character, in the text before any edit.
        end: one past the last character.
        rule: the rule that decided.
        action: REMOVE, REDACT or BLOCK; the text ends before a BLOCK.
        shown: the replacement.
    """

    start: int
    end: int
    rule: str
    action: Action
    shown: str


@dataclass
class TextDecision:
    """The result for one text.

    Attributes:
        taken: every finding with its action, in the order of the text.
        text: the edited text; where something blocks, the part before it.
        edits: the differences from the original text.
    """

    taken: tuple[TakenAction, ...]
    text: str
    edits: tuple[Edit, ...] = ()

    @property
    def blocked(self) -> tuple[str, ...]:
        """The rules that block, in order, each once."""
        rules = (one.rule for one in self.taken if one.action is Action.BLOCK)
        return tuple(dict.fromkeys(rules))


def apply(
    table: ActionTable,
    text: str,
    findings: Iterable[Finding],
    placeholders: Placeholders | None = None,
) -> TextDecision:
    """Applies the policy to ``text``. The same findings in any order give the same decision.

    Args:
        table: the actions of the policy.
        text: the inspected text.
        findings: the findings in it.
        placeholders: of the request; new ones are added.
    """
    ordered = sorted(set(findings), key=lambda f: (f.start, f.end, f.rule, f.severity))
    if not ordered:
        return TextDecision((), text)
    taken = tuple(map(table.taken, ordered))
    edits = _edits(taken, text, placeholders or Placeholders((text,)))
    return TextDecision(taken, edited(text, edits), tuple(edits))


def edited(text: str, edits: Sequence[Edit]) -> str:
    """``text`` with ``edits``; it ends before the first that blocks."""
    shown, at = [], 0
    for edit in edits:
        shown.append(text[at : edit.start])
        if edit.action is Action.BLOCK:
            return "".join(shown)
        shown.append(edit.shown)
        at = edit.end
    return "".join((*shown, text[at:]))


def clusters(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The unions of overlapping ``spans``, in order. Spans that only touch stay apart; empty ones are left out."""
    unions: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if unions and start < unions[-1][1]:
            unions[-1] = (unions[-1][0], max(end, unions[-1][1]))
        else:
            unions.append((start, end))
    return unions


def _edits(taken: Sequence[TakenAction], text: str, placeholders: Placeholders) -> list[Edit]:
    editing = [one for one in taken if one.action in _EDITS]
    edits, index = [], 0
    for start, end in clusters((one.start, one.end) for one in editing):
        members = []
        while index < len(editing) and editing[index].start < end:
            members.append(editing[index])
            index += 1
        winner = min((one for one in members if one.start < one.end), key=_rank)
        rule, action = winner.rule, winner.action
        shown = placeholders.of(rule, text[start:end]) if action is Action.REDACT else ""
        edits.append(Edit(start, end, rule, action, shown))
        if action is Action.BLOCK:
            break
    return edits


def _rank(one: TakenAction) -> tuple[int, int, int, int, str]:
    return -one.action, -one.severity, one.start - one.end, one.start, one.rule
