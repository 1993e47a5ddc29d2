"""Compiles the rules of a policy, scans texts with all of them, and resolves overlapping findings.

One pass of RE2 tells which rules may match at all, by hints that are cheaper than their patterns;
only these are searched.

`Subject` is the text as characters and as UTF-8: RE2 matches bytes, findings count
characters. Digits of other scripts and the many dashes are folded to ASCII one for one, so that
offsets stay.

Findings of the content families (pii, secret, deny, custom) compete with each other, and those of
injection among themselves; limits compete with nothing. The more severe wins, then the longer, then
the one further left, then the rule id. What the winner leaves of a loser remains if it has a letter
or digit: every letter and digit that a finding covered stays covered, and by one of those that
compete.
"""

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import re2

from gateway.safety.findings import BY_PLACE, Finding, Severity
from gateway.safety.patterns import compiled, set_of
from gateway.safety.rules.indicators import Indicator, judge, weight_at
from gateway.safety.rules.lexicon import NO_LISTS, Lexicon
from gateway.safety.rules.payloads import (
    ANY_RUN,
    ROT13,
    RUN_CHARS_MAX,
    is_nested,
    payloads_of,
    repetitions,
)
from gateway.safety.rules.spec import Form, RuleMatch, RuleSpec, Span, Validator
from gateway.safety.rules.validators import COSTLY, TAKES_WHOLE, VALIDATORS
from gateway.safety.text.characters import DASHES

_TO_FOLD: Final = re.compile(rf"[^\D0-9]|[{DASHES}]")
_ASCII: Final = bytes(range(0x80))


class Subject:
    """One text to search in."""

    def __init__(self, text: str) -> None:
        # A lone surrogate becomes one "?": one character for one character.
        self.text, self.data = text, text.encode("utf-8", "replace")
        # Look only at characters beyond ASCII; most texts have few.
        if not text.isascii() and _TO_FOLD.search(self.data.translate(None, _ASCII).decode()):
            self.text = _TO_FOLD.sub(_folded, text)
            self.data = self.text.encode("utf-8", "replace")
        self.is_single_byte = len(self.data) == len(self.text)

    def chars(self, offset: int) -> int:
        """Return the number of characters before the byte at `offset`."""
        return offset if self.is_single_byte else int(self._starts.searchsorted(offset))

    def bytes_at(self, char: int) -> int:
        """Return the byte offset of a character, or of the end."""
        return char if self.is_single_byte else int(self._starts[char])

    @cached_property
    def _starts(self) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        """Byte offsets of the characters, and of the end."""
        data = np.frombuffer(self.data, np.uint8)
        return np.append(np.flatnonzero(data & 0xC0 != 0x80), len(data))


def _folded(match: re.Match[str]) -> str:
    char = match.group()
    return str(unicodedata.decimal(char)) if char.isdecimal() else "-"


COSTLY_FOUND_MAX: Final = 512
"""Matches of a form that a costly validator confirms; a text with more is a list of them, and the rest
counts too.
"""
_WORD: Final = re.compile(rb"[A-Za-z0-9]+")


class CompiledForm:
    """A pattern that can be searched for."""

    def __init__(self, spec: RuleSpec, form: Form) -> None:
        """Compile the pattern; raises `PatternError` if it is not accepted."""
        self.spec = spec
        self.form = form
        self.hint = _hint_of(spec, form)
        self._regex = compiled(form.pattern.encode())
        self._validate: Validator = VALIDATORS[spec.validator]
        self._found_max = COSTLY_FOUND_MAX if spec.validator in COSTLY else sys.maxsize
        self._takes_whole = spec.validator in TAKES_WHOLE
        self._context = _context_of(spec) if form.in_context else None

    def findings(self, subject: Subject) -> Iterator[Span]:
        """Yield the places that the validator confirms, from left to right; those of forms with a head may overlap.

        A head may begin inside the text behind another one.
        """
        # One search for the words costs less than the search for each match before which there is none.
        if self._context is not None and self._context.search(subject.text) is None:
            return
        data, count, at = subject.data, 0, 0
        while (match := self._regex.search(data, at)) is not None:
            start, end = match.span()
            first, last = subject.chars(start), subject.chars(end)
            result: Span | bool | None = None
            if self._in_context(subject.text, first):
                candidate = RuleMatch(subject.text, first, last, self.spec)
                result = count >= self._found_max or self._validate(candidate)
            if not result:
                at = end if self._takes_whole else _next_word(data, start)
                continue
            span = (first, last) if isinstance(result, bool) else result
            yield span
            count += 1
            # The head of the next match may overlap this finding.
            behind = span[0] if self.form.head else span[1]
            at = max(start + 1, subject.bytes_at(behind))

    def _in_context(self, text: str, start: int) -> bool:
        """Return whether a context word stands before `start`; True for forms that need none."""
        if self._context is None:
            return True
        first = max(0, start - self.spec.context_chars)
        return self._context.search(text, first, start) is not None


def _next_word(data: bytes, start: int) -> int:
    """Return where the search goes on behind a refused match: a number may begin inside what looked like one."""
    word = _WORD.match(data, start)
    return word.end() if word else start + 1


def _hint_of(spec: RuleSpec, form: Form) -> str:
    """Return a pattern that occurs in every text with a match.

    A context word is rarer than digits, and cheaper to search.
    """
    if form.in_context and not form.hint:
        return "(?i)" + "|".join(map(re.escape, spec.context))
    return form.hint or form.pattern


def _context_of(spec: RuleSpec) -> re.Pattern[str]:
    """Compile the context words: plain words only, so the standard library's engine is linear here."""
    words = "|".join(re.escape(word) for word in spec.context)
    return re.compile(rf"(?<![^\W_])(?:{words})", re.IGNORECASE)


def findings_of(subject: Subject, occurring: Iterable[CompiledForm]) -> list[Finding]:
    """Return the findings of the forms that occur in `subject`, unordered and with overlaps."""
    plain: list[Finding] = []
    indicators: list[Indicator] = []
    for form in occurring:
        rule, weight = form.spec.id, form.form.weight
        spans = form.findings(subject)
        if weight:
            indicators.extend(
                Indicator(rule, *span, weight_at(subject.text, span[0], weight)) for span in spans
            )
        else:
            plain.extend(Finding(rule, *span, form.spec.severity) for span in spans)
    return [*plain, *judge(indicators)] if indicators else plain


_ALWAYS: Final = r"\A"
"""Occurs in every text, so that an engine that gives up can be told from a text without matches."""


@lru_cache(maxsize=8)
def _set_of(patterns: tuple[str, ...]) -> "re2.Set | None":
    """Compile a set of patterns once, as a new policy mostly has those of the old one; None if it is too large."""
    try:
        return set_of(patterns, whole=False)
    except re2.error:
        return None


class RuleSet:
    """The rules of a policy, compiled. Immutable, and a scan keeps no state, so several threads may scan."""

    def __init__(
        self,
        specs: Sequence[RuleSpec],
        lists: Lexicon = NO_LISTS,
        *,
        is_prompt: bool = True,
    ) -> None:
        """Compile the rules; raises `PatternError` if a pattern is not accepted.

        Only prompts are decoded, and searched for repetitions.
        """
        self.specs = tuple(specs)
        self.lists = lists
        self._is_prompt = is_prompt
        self._forms = [CompiledForm(spec, form) for spec in self.specs for form in spec.forms]
        self._hints = _set_of((*(form.hint for form in self._forms), _ALWAYS))

    def scan(self, text: str) -> list[Finding]:
        """Return the findings in `text`, ordered by place; those that compete do not overlap."""
        subject = Subject(text)
        findings = findings_of(subject, self._occurring(subject.data))
        if self._is_prompt:
            findings += self._of_prompts(subject)
        if not self.lists.is_empty:
            findings += self.lists.denied(text)
            findings = self.lists.without_allowed(text, findings)
        return resolved(text, findings) if findings else []

    def scan_hidden(self, payload: str, name: str, span: Span) -> list[Finding]:
        """Return the findings in a decoded text from MEDIUM on, one per family, at the place of the payload.

        They are called "FAMILY.encoded.NAME". A hidden injection is no accident, so it is severe.
        """
        subject = Subject(payload)
        inner = findings_of(subject, self._occurring(subject.data))
        worst: dict[str, Severity] = {}
        for finding in (*inner, *self.lists.denied(subject.text)):
            family = finding.rule.split(".", 1)[0]
            worst[family] = max(finding.severity, worst.get(family, Severity.LOW))
        if worst.get("injection", Severity.LOW) >= Severity.MEDIUM:
            worst["injection"] = max(worst["injection"], Severity.HIGH)
        findings = [
            Finding(f"{family}.encoded.{name}", *span, severity)
            for family, severity in sorted(worst.items())
            if severity >= Severity.MEDIUM
        ]
        # Decoding stops here, or a caller could nest payloads without end.
        if is_nested(subject.data):
            findings.append(Finding("injection.encoded.nested", *span, Severity.MEDIUM))
        return findings

    def _of_prompts(self, subject: Subject) -> Iterator[Finding]:
        """Yield what is looked for in prompts alone: repetitions and encoded text."""
        if len(subject.text) > RUN_CHARS_MAX:
            for span in repetitions(subject.text):
                yield Finding("limit.repetition", *span, Severity.MEDIUM)
        for payload in payloads_of(subject.data) if ANY_RUN.search(subject.data) else ():
            span = subject.chars(payload.start), subject.chars(payload.end)
            if payload.text:
                yield from self.scan_hidden(payload.text, payload.encoding, span)
            if payload.is_cut:
                yield Finding("limit.encoded", *span, Severity.MEDIUM)
        # Rot13 has no runs to look for: injections that show when the whole text is turned.
        turned = subject.data.translate(ROT13)
        scored = [form for form in self._occurring(turned) if form.form.weight]
        for finding in findings_of(Subject(turned.decode()), scored) if scored else ():
            if finding.severity >= Severity.HIGH:
                rule = "injection.encoded.rot13"
                yield Finding(rule, finding.start, finding.end, Severity.HIGH)

    def _occurring(self, data: bytes) -> list[CompiledForm]:
        """Return the forms that may match in `data`, by one pass over it."""
        indexes = None if self._hints is None else self._hints.Match(data)
        # For want of memory the engine gives up without an error; then every form is searched.
        if indexes is None:
            return self._forms
        return [self._forms[index] for index in sorted(indexes) if index < len(self._forms)]


def resolved(text: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that remain, ordered by place."""
    groups: dict[str, list[Finding]] = {"limit": [], "injection": [], "content": []}
    for finding in findings:
        family = finding.rule.split(".", 1)[0]
        groups[family if family in groups else "content"].append(finding)
    standing = [
        *groups["limit"],
        *_winners(text, groups["injection"]),
        *_winners(text, groups["content"]),
    ]
    return sorted(standing, key=BY_PLACE)


def _winners(text: str, findings: list[Finding]) -> Iterator[Finding]:
    if len(findings) < 2:
        yield from findings
        return
    covered = bytearray(len(text))
    for finding in sorted(findings, key=_rank):
        # Of the rest of a loser, punctuation alone tells nothing.
        for start, end in _uncovered(covered, finding.start, finding.end):
            whole = (start, end) == (finding.start, finding.end)
            if whole or any(char.isalnum() for char in text[start:end]):
                covered[start:end] = b"\1" * (end - start)
                yield Finding(finding.rule, start, end, finding.severity)


def _rank(finding: Finding) -> tuple[int, int, int, str]:
    """Order findings by severity, then length, then place, then rule."""
    return -finding.severity, finding.start - finding.end, finding.start, finding.rule


def _uncovered(covered: bytearray, start: int, end: int) -> Iterator[Span]:
    """Yield the parts of a span that no other finding covers."""
    while (start := covered.find(0, start, end)) >= 0:
        stop = covered.find(1, start, end)
        stop = end if stop < 0 else stop
        yield start, stop
        start = stop
