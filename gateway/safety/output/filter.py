"""The output filter: detokenized text in, releasable text out.

It runs between the detokenizer and the stop strings: a stop string cannot cut a secret in two
before it is found, and stop strings are searched in the text that the caller reads. Its steps, in
order: edit what rules, models and the watch for repetitions find, replace placeholders by the
caller's own values. Rules depend on the text alone, never on how it was split into pieces; models
read its windows (`gateway.safety.output.windows`).

`answer_rules` are those for answers only: canary strings, images of foreign hosts, terminal escapes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import re2

from gateway.safety.findings import (
    Action,
    ActionTable,
    DryRun,
    Finding,
    Move,
    Placeholders,
    Severity,
    TextDecision,
    moves_of,
)
from gateway.safety.output import echo
from gateway.safety.output.automaton import Automaton, WordList
from gateway.safety.output.redactor import OutputRules, Redactor, covers
from gateway.safety.output.view import Scanner, ViewScanner
from gateway.safety.output.windows import AnswerWindow, AnswerWindows
from gateway.safety.rules.lexicon import DENY_LIST, Lexicon
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import UNBOUNDED, Form, RuleSpec
from gateway.safety.settings import OutputSettings

CANARY: Final = "output.canary"
IMAGE: Final = "output.markdown_image"
ANSI: Final = "output.ansi"
_SEVERITIES: Final = {CANARY: Severity.CRITICAL, IMAGE: Severity.HIGH, ANSI: Severity.MEDIUM}

_URL: Final = r"(?:[A-Za-z][A-Za-z0-9+.-]{0,20}:)?[/\\]{2}"
IMAGE_PATTERNS: Final = (
    rf"!\[[^\]\n]{{0,300}}\]\([ \t]*<?{_URL}[^)\n]*\)",
    r"!\[[^\]\n]{0,300}\]\[[^\]\n]{0,100}\]",
    rf"(?i)<img\b[^>]*{_URL}[^>]*>",
)
"""Images written in place, by reference, and in HTML."""
ANSI_PATTERN: Final = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~]?)"
    r"|[\x80-\x9f][0-?]*[ -/]*[@-~]?"
)


def answer_rules(settings: OutputSettings, table: ActionTable) -> list[RuleSpec]:
    """Return the rules for answers only, as far as they are switched on."""
    forms = {
        CANARY: [Form(f"(?i){re2.escape(canary)}") for canary in settings.canaries],
        IMAGE: list(map(Form, IMAGE_PATTERNS)),
        ANSI: [Form(ANSI_PATTERN)],
    }
    rules = [
        RuleSpec(
            rule,
            tuple(forms[rule]),
            severity,
            UNBOUNDED,
            validator="foreign_image" if rule == IMAGE else "",
            options=tuple(host.lower() for host in settings.image_hosts),
            context_chars=0,
            lookbehind=0,
            lookahead=0,
        )
        for rule, severity in _SEVERITIES.items()
    ]
    return [rule for rule in rules if table.choose(rule.id, rule.severity).action > Action.ALLOW]


class Restorer:
    """Replaces placeholders by their values; holds back only what may become a placeholder of the request."""

    def __init__(self, placeholders: Placeholders) -> None:
        self._placeholders = placeholders
        self._pending = ""

    def push(self, text: str) -> str:
        """Return what may be shown after `text` came."""
        if not self._pending and "<" not in text:
            return text
        text = self._pending + text
        # Only the last "<" can be a placeholder whose end has not come.
        begin = text.rfind("<")
        tail = text[begin:] if begin >= 0 else ""
        if tail and not any(
            placeholder != tail and placeholder.startswith(tail)
            for placeholder in self._placeholders.values
        ):
            tail = ""
        self._pending = tail
        return self._placeholders.restore(text[: len(text) - len(tail)])

    def finish(self) -> str:
        """Return the rest, when no more text comes."""
        pending, self._pending = self._pending, ""
        return pending


def output_rules(
    settings: OutputSettings,
    table: ActionTable,
    watched: Sequence[RuleSpec],
    scanner: Scanner,
    lists: Lexicon,
) -> OutputRules:
    """Build the filter rules of a policy that filters answers.

    Args:
        settings: settings of rules for answers only.
        table: actions on answers.
        watched: all rules of `scanner`; those that only flag cost nothing.
        scanner: finds matches of the rules and of the operator's lists.
        lists: the lists alone.

    Raises:
        PatternError: a pattern cannot be followed in a stream.
    """
    for_answers = answer_rules(settings, table)
    editing = [rule for rule in (*watched, *for_answers) if table.edits(rule.id)]
    words = (*(lists.deny if table.edits(DENY_LIST) else ()), *lists.allow)
    automaton = Automaton(editing, WordList(words))
    # Each by itself: what one rule finds must not hide what another finds at the same place.
    scanners = [RuleSet([rule], is_prompt=False) for rule in for_answers]
    return OutputRules(automaton, ViewScanner(scanner, *scanners), table, lists)


@dataclass
class AnswerOutcome:
    """The result of inspecting an answer.

    Attributes:
        policy: version of the policy that decided.
        counts: count of findings by rule and action.
        moves: findings that the policy in dry run treats differently.
    """

    policy: str
    counts: Mapping[tuple[str, Action], int]
    moves: Counter[Move]


class OutputFilter:
    """The filter of one answer. Offsets count characters of the answer as the model gave it.

    Attributes:
        windows: parts of the answer that token classifiers read; None if none does.
        entities: entities that they have found, by offset in the answer.
    """

    def __init__(
        self,
        shared: OutputRules,
        placeholders: Placeholders | None = None,
        system: str = "",
        trial: OutputRules | None = None,
        counts: DryRun | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            shared: rules of the policy.
            placeholders: those of the prompt.
            system: system message as the model got it.
            trial: rules of the policy in dry run, which also inspects every answer.
            counts: counts of that policy.
        """
        self._shared = shared
        placeholders = placeholders or Placeholders()
        self._trial, self._counts = trial, counts
        self._outcome: AnswerOutcome | None = None
        self._raw: list[str] = []
        window = shared.window_tokens
        self.windows = None if window is None else AnswerWindows(window)
        self.entities: list[Finding] = []
        self._holds = shared.holds
        self._finished = False
        action = shared.table.choose(echo.RULE, echo.SEVERITY).action
        watch = None
        if action > Action.ROUTE:
            watch = echo.EchoWatch(system, stops=action is Action.BLOCK)
        self._echo = watch if watch is not None and watch.runs else None
        self._redactor = Redactor(shared, placeholders, echo=self._echo)
        restores = shared.restore and placeholders.values
        self._restorer = Restorer(placeholders) if restores else None

    @property
    def stopped(self) -> tuple[str, ...]:
        """Rules that ended the answer. Nothing more is shown, and the run is to be cancelled."""
        return self._redactor.stopped

    @property
    def raw(self) -> str:
        """The answer as the model gave it; never for a caller."""
        return "".join(self._raw)

    @property
    def decided(self) -> int:
        """Number of characters that no rule can claim any more."""
        return self._redactor.decided

    def hides(self, start: int, end: int) -> bool:
        """Return whether a decided character from `start` to `end` is hidden; ask in order."""
        # Behind a block, or behind the cut of a possible match.
        if end > self._redactor.shown_to:
            return True
        return covers(self._redactor.hidden, start, end)

    @property
    def unread(self) -> bool:
        """Whether token classifiers have to read more of the answer."""
        if self.windows is None or (self._holds and self._finished):
            return False
        return self.windows.unread

    def push(self, text: str) -> str:
        """Return what may be shown after `text` came."""
        self._raw.append(text)
        if self.windows is not None:
            self.windows.push(text)
        return "" if self._holds else self._after(self._redactor.push(text))

    def settle(self, window: AnswerWindow, findings: Iterable[Finding]) -> str:
        """Return what may be shown after token classifiers read `window`; `findings` have offsets in its text."""
        assert self.windows is not None, "they read them"
        counted = self._shared.lists.without_allowed(window.text, tuple(findings))
        text, entities = self.windows.settle(window, counted)
        self.entities += entities
        # Rules have released the text already; entities are only counted.
        if not self._holds:
            return ""
        table = self._shared.table
        edited = [entity for entity in entities if table.edits(entity.rule)]
        return self._after(self._redactor.push(text, edited))

    def finish(self, truncated: bool = False) -> str:
        """Return what was held back, when no more text comes.

        Args:
            truncated: the model did not end by itself (a limit, a stop string). At most
                `TRUNCATED_CHARS` characters show of a possible match that is cut at
                the very end.
        """
        windows, self._finished = self.windows, True
        # The end of the answer was not read by all token classifiers.
        if windows is not None and self._holds and windows.unread:
            truncated = True
        text = self._after(self._redactor.finish(truncated))
        if windows is not None and self._holds:
            # What no token classifier has read does not show.
            self._redactor.shown_to = min(self._redactor.shown_to, windows.known_to)
        return text + (self._restorer.finish() if self._restorer is not None else "")

    def review(self) -> TextDecision:
        """Decide about the answer so far by all rules, including those that only flag."""
        return self._shared.review(self.raw, self._others())

    def outcome(self) -> AnswerOutcome:
        """Return the findings in the whole answer, and count the dry run; call it at the end. Both happen once."""
        if self._outcome is None:
            decision = self.review()
            counts = Counter((finding.rule, finding.action) for finding in decision.actions)
            moves = self._rehearsed(decision)
            self._outcome = AnswerOutcome(self._shared.version, counts, moves)
        return self._outcome

    def _rehearsed(self, decision: TextDecision) -> Counter[Move]:
        if self._trial is None or self._counts is None:
            return Counter()
        trial = self._trial.review(self.raw, self._others())
        moves = moves_of(decision.actions, trial.actions)
        self._counts.add(moves, (decision.text, decision.blocked) != (trial.text, trial.blocked))
        return moves

    def _others(self) -> list[Finding]:
        """Return what was found by others than rules."""
        return [*self.entities, *(() if self._echo is None else self._echo.findings)]

    def _after(self, text: str) -> str:
        return self._restorer.push(text) if self._restorer is not None and text else text
