"""The redactor of the output filter: removes what rules find, and records which spans of the answer are hidden.

`StreamWatch` tells up to which offset no match can still reach. The scanner that also inspects
prompts decides about that text, and only where something has matched. So the result does not depend
on the pieces: scanning a text between two offsets that no match can cross finds the same as
scanning the whole text.

That is exact as long as matches are no longer than `RuleSpec.max_length` and a scan depends
on the text near a match alone. Where matches overlap each other without end (a table of numbers
under a rule for telephone numbers), text is decided once it is longer than two of the longest
matches; the scanner then starts again inside such a chain.

What models and the watch for repetitions of the system message find is decided together with it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.safety.findings import (
    Action,
    ActionTable,
    Edit,
    Finding,
    Placeholders,
    TextDecision,
    apply,
    clusters,
    edited,
)
from gateway.safety.output.automaton import Automaton, StreamWatch
from gateway.safety.output.echo import EchoWatch
from gateway.safety.output.view import APART, Scanner, readings, view
from gateway.safety.rules.lexicon import NO_LISTS, Lexicon
from gateway.safety.rules.spec import UNBOUNDED, Span

_CONTEXT_CHARS: Final = 256
"""Length of shown text, as rules see it, that is kept to find a place where a scan can begin."""
TRUNCATED_CHARS: Final = 4
"""Characters shown of a possible match that a cut answer leaves open at its end."""
_TRIES: Final = 16
"""Characters back that are followed to see whether a match from there reaches over."""
_CHAIN_CHARS: Final = 256
"""How much longer than two matches a chain of overlapping ones may be, in characters."""


@dataclass(frozen=True)
class OutputRules:
    """A policy made ready for answers; made once and shared by all answers.

    Attributes:
        automaton: patterns of the rules that change or end an answer, and of allow lists.
        scanner: decides by all rules, on the same view of the text as the automaton.
        table: actions of the policy.
        lists: lists of the operator.
        version: version of the policy.
        restore: whether the caller's values return in place of their placeholders.
        window_tokens: longest window that token classifiers read of an answer; None if none reads
            answers.
        holds: text waits for the token classifiers, because the policy edits what they find.
    """

    automaton: Automaton
    scanner: Scanner
    table: ActionTable
    lists: Lexicon = NO_LISTS
    version: str = ""
    restore: bool = False
    window_tokens: int | None = None
    holds: bool = False

    def review(self, text: str, others: Iterable[Finding] = ()) -> TextDecision:
        """Decide about a whole answer by all rules, including those that only flag and never wait in the stream."""
        return apply(self.table, text, [*self.scanner.scan(text), *others])


class Redactor:
    """Releases text as soon as it is decided.

    Attributes:
        stopped: rules that ended the answer; nothing is shown after it.
        hidden: replaced spans, by offset in the model's answer.
        decided: number of characters of the model's answer that are dealt with.
        shown_to: offset from which on nothing shows; UNBOUNDED if there is no such place.
    """

    def __init__(
        self,
        rules: OutputRules,
        placeholders: Placeholders,
        is_known: Callable[[str], bool] = lambda _: False,
        echo: EchoWatch | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            rules: rules of the policy.
            placeholders: those of the prompt.
            is_known: whether a value that rules find may show.
            echo: finds repetitions of the system message.
        """
        self._rules = rules
        self._is_known = is_known
        self._of_prompt = placeholders
        self._placeholders: Placeholders | None = None
        self._watch = StreamWatch(rules.automaton)
        self._pending: list[str] = []
        self._echo = echo
        self._others: list[Finding] = []
        """Findings of models and of repetitions, by offset in the answer."""
        self._context = ""
        self._context_cut = False
        self._chain_end = 0
        self._inside_chain = False
        self.stopped: tuple[str, ...] = ()
        self.hidden: deque[Span] = deque()
        self.decided = 0
        self.shown_to = UNBOUNDED

    @property
    def pending_chars(self) -> int:
        """Number of characters that wait."""
        return self._watch.end - self.decided

    def push(self, text: str, entities: Sequence[Finding] = ()) -> str:
        """Return what may be shown after `text` came.

        `entities` are those that models found in it, by offset in the answer; they count as
        findings of rules.
        """
        # Nothing follows a block.
        if self.stopped or not text:
            return ""
        watch = self._watch
        self._follow(text, entities)
        open_from = watch.end if self._echo is None else self._echo.free_to
        # The usual case: nothing has matched or may match, so the text passes unscanned.
        if not self._pending and watch.is_idle and open_from == watch.end:
            self.decided = watch.end
            self._remember(text)
            return text
        # Release what no match can reach any more.
        free = watch.free_to(open_from)
        self._pending.append(text)
        if free > self.decided:
            return self._release(free)
        # Matches that overlap without end must not hold the answer for ever.
        if watch.end > self._chain_end and self.pending_chars > 2 * self._reach() + _CHAIN_CHARS:
            return self._cut_chain(open_from - self.decided)
        return ""

    def finish(self, truncated: bool = False) -> str:
        """Return the rest, when no more text comes.

        Args:
            truncated: the model did not end here by itself, so what is open at the end may be a
                secret cut short: at most `TRUNCATED_CHARS` characters of it show.
        """
        if self.stopped or not self.pending_chars:
            return ""
        if self._echo is not None:
            self._others += self._echo.finish()
        pending, open_at = self._text(), self._watch.open_from - self.decided
        edits = self._edits(pending, self._scan(pending, len(pending)))
        # A match that began before the cut may be half a secret: show only its first characters.
        if truncated and open_at < len(pending):
            shown_to = _outside(open_at + TRUNCATED_CHARS, edits)
            edits = [edit for edit in edits if edit.start < shown_to]
            pending = pending[:shown_to]
            self.shown_to = self.decided + shown_to
        text = self._show(pending, edits)
        self.decided = self._watch.end
        return text

    def finish_unscanned(self) -> str:
        """Return the rest of a text in which every value is known, see `is_known`."""
        if self.stopped or not self.pending_chars:
            return ""
        self.decided = self._watch.end
        return self._text()

    def _follow(self, text: str, entities: Sequence[Finding]) -> None:
        """Follow `text`; other findings claim their places as matches of rules do."""
        watch, begin = self._watch, self._watch.end
        others = list(entities)
        if self._echo is not None:
            others += self._echo.feed(text)
        if not others:
            watch.feed(text)
            return
        at = 0
        for finding in sorted(others, key=lambda finding: finding.end):
            to = max(at, finding.end - begin)
            watch.feed(text[at:to])
            watch.claim(*finding.span)
            at = to
        watch.feed(text[at:])
        self._others = [other for other in self._others if other.end > self.decided] + others

    def _release(self, free: int) -> str:
        pending, length = self._text(), free - self.decided
        piece, rest = pending[:length], pending[length:]
        edits: Sequence[Edit] = ()
        # Scan only where the automaton saw a match; its patterns may match more than the rules.
        if self._watch.claims_before(free):
            edits = self._edits(piece, self._scan(pending, length))
            self._watch.forget_before(free)
        self._pending = [rest] if rest else []
        self._inside_chain = False
        return self._show(piece, edits)

    def _cut_chain(self, limit: int) -> str:
        """Decide about a part, at most `limit` characters, of a chain of overlapping matches.

        No partial match reaches it.
        """
        pending, reach = self._text(), self._reach()
        findings = self._scan(pending, len(pending))
        *_, shortest = readings(pending)
        last = min(limit, next(iter(shortest.starts[-reach:]), 0))
        table = self._rules.table
        cut = _before(last, clusters(f.span for f in findings if table.edits(f.rule)))
        rest = len(pending) - max(cut, 0)
        if rest > 2 * reach:
            # Scanned again when it is twice as long: so every character is scanned a few times at most.
            self._chain_end = self._watch.end + rest
        if cut <= 0:
            return ""
        edits = self._edits(pending[:cut], [f for f in findings if f.start < cut])
        text = self._show(pending[:cut], edits)
        self._pending = [pending[cut:]]
        self._inside_chain = True
        return text

    def _reach(self) -> int:
        """Return the length of the text before the end that may hold, or decide about, a match."""
        return max(self._watch.widest, self._rules.automaton.context_after)

    def _text(self) -> str:
        if len(self._pending) > 1:
            self._pending = ["".join(self._pending)]
        return self._pending[0]

    def _scan(self, pending: str, length: int) -> list[Finding]:
        """Return the findings that begin in the first `length` characters of `pending`, by offset in it."""
        before = self._context_chars(pending)
        beyond = self._beyond(pending, length)
        text = self._context[len(self._context) - before :] + pending[:beyond]
        # Inside a chain a match may have begun before the place where the scanner started again.
        first = 0 if self._inside_chain else before
        findings = [
            replace(f, start=max(f.start - before, 0), end=min(f.end - before, length))
            for f in self._rules.scanner.scan(text)
            if first <= f.start < before + length
            and f.end > before
            and not self._is_known(text[f.start : f.end])
        ]
        return findings + [
            replace(other, start=other.start - self.decided, end=other.end - self.decided)
            for other in self._others
            if self.decided <= other.start < self.decided + length
        ]

    def _beyond(self, pending: str, length: int) -> int:
        """Return the offset up to which `pending` decides about its first `length` characters."""
        if APART.search(pending):
            return len(pending)
        behind = view(pending[length:]).starts[: max(1, self._rules.automaton.context_after)]
        return length + (behind[-1] + 1 if behind else 0)

    def _context_chars(self, pending: str) -> int:
        """Return how much shown text the scan needs before `pending`.

        Enough for the rules, and a beginning from which no match reaches into `pending`: cut off
        from the text before it, a place may look like the start of a word when it is none.
        """
        automaton, context = self._rules.automaton, self._context
        least = min(automaton.context_before, len(context))
        if self._inside_chain:
            return least
        if APART.search(context):
            return len(context)  # a sequence or an escape may reach into `pending`
        least = min(max(1, least), len(context))
        for chars in range(least, min(len(context), _CONTEXT_CHARS)):
            behind = context[len(context) - chars :]
            if not automaton.may_begin(behind + pending[:1] if chars < _TRIES else behind[0]):
                return chars
        return least if self._context_cut else len(context)

    def _edits(self, piece: str, findings: Sequence[Finding]) -> Sequence[Edit]:
        if not findings:
            return ()
        # A copy: values of the answer must not be restored in a later turn.
        if self._placeholders is None:
            self._placeholders = self._of_prompt.for_answer()
        decision = apply(self._rules.table, piece, findings, self._placeholders)
        if decision.edits and decision.edits[-1].action is Action.BLOCK:
            last = decision.edits[-1]
            blocking = (
                finding.rule
                for finding in decision.actions
                if finding.action is Action.BLOCK
                and finding.start < last.end
                and finding.end > last.start
            )
            self.stopped = tuple(dict.fromkeys(blocking))
        return decision.edits

    def _show(self, piece: str, edits: Sequence[Edit]) -> str:
        """Return `piece` with `edits`; it is dealt with from now on."""
        for edit in edits:
            start, end = self.decided + edit.start, self.decided + edit.end
            self.hidden.append((start, end))
            if edit.action is Action.BLOCK:
                self.shown_to = start
        self.decided += len(piece)
        self._remember(piece)
        return edited(piece, edits) if edits else piece

    def _remember(self, piece: str) -> None:
        self._context += view(piece).text
        if len(self._context) > 4 * _CONTEXT_CHARS:
            keep = max(_CONTEXT_CHARS, self._rules.automaton.context_before)
            self._context = self._context[-keep:]
            self._context_cut = True


def covers(spans: deque[Span], start: int, end: int) -> bool:
    """Return whether one of `spans` covers a character from `start` to `end`; earlier spans are dropped."""
    while spans and spans[0][1] <= start:
        spans.popleft()
    return bool(spans) and spans[0][0] < end


def _outside(offset: int, edits: Sequence[Edit]) -> int:
    """Return `offset`, or the end of the edit that it lies in."""
    return next((edit.end for edit in edits if edit.start < offset < edit.end), offset)


def _before(offset: int, unions: Sequence[tuple[int, int]]) -> int:
    """Return `offset`, or the start of the union that it lies in."""
    return next((start for start, end in unions if start < offset < end), offset)


class AssembledFilter:
    """Filters what is assembled from one answer: its text without the calls, its reasoning, and values inside calls.

    The output filter has decided about the answer as the model wrote it. Assembling joins text around
    a call, and turns `4.1e15` or a string that is JSON itself into what the caller reads. So a finding
    counts here unless it occurs in the answer as it was written, where the policy let it pass or a
    value of the caller's own was restored.
    """

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._placeholders = Placeholders()
        self._written: list[str] = []
        self._known_values = 0, frozenset[str]()
        """Number of parts that were written, and the values in them that rules would edit."""
        self._text, self._reasoning = (
            Redactor(rules, self._placeholders, self._is_known) for _ in range(2)
        )
        self._blocked: tuple[str, ...] = ()
        self._altered_chars = 0
        """Characters that were written but are not in the text so far: marks, calls, reasoning."""

    @property
    def blocked(self) -> tuple[str, ...]:
        """Rules that ended the answer; what follows must not be shown."""
        return self._text.stopped or self._reasoning.stopped or self._blocked

    def note(self, written: str) -> None:
        """Record the next part of the answer as it was written, before it is assembled."""
        if written:
            self._written.append(written)
            self._altered_chars += len(written)

    def push(self, text: str) -> str:
        """Return what may be shown after `text` was assembled."""
        self._altered_chars -= len(text)
        return self._text.push(text)

    def push_reasoning(self, text: str) -> str:
        """Return what may be shown of the reasoning after `text` was assembled."""
        return self._reasoning.push(text)

    def finish(self) -> tuple[str, str]:
        """Return the rest of the text and of the reasoning."""
        if not self._altered_chars:
            return self._text.finish_unscanned(), ""  # nothing is in it that was not let pass
        return self._text.finish(), self._reasoning.finish()

    def value(self, text: str) -> str:
        """Return what may be shown of a whole value."""
        findings = [
            finding
            for finding in self._rules.scanner.scan(text)
            if not self._is_known(text[finding.start : finding.end])
        ]
        decision = apply(self._rules.table, text, findings, self._placeholders)
        self._blocked = self._blocked or decision.blocked
        return decision.text

    def _is_known(self, value: str) -> bool:
        """Return whether `value` was let pass: it is (part of) a finding in the answer as it was written."""
        size, values = self._known_values
        # The answer has grown since it was scanned.
        if size != len(self._written):
            written = "".join(self._written)
            self._written = [written]
            findings, edits = self._rules.scanner.scan(written), self._rules.table.edits
            values = frozenset(
                written[finding.start : finding.end] for finding in findings if edits(finding.rule)
            )
            self._known_values = 1, values
        return any(value in finding for finding in values)
