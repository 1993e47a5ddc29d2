"""Scans a text with patterns that are compiled together; decoding and lists are up to `RuleSet`.

`Subject` is the text as characters and as UTF-8: both engines match bytes, findings count
characters. Digits of other scripts and the many dashes are folded to ASCII one for one, so that
offsets stay.

`Prefilter` is one pass of Vectorscan (block mode) that tells which patterns occur at all. Each
pattern reports once at most, so hostile text costs the same as any other. It may report a pattern
that does not occur (large repeats are approximated), never the other way round.

`CompiledForm` finds the places of one pattern with RE2, only where the pass reported it.
"""

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import hyperscan
import numpy as np

from gateway.safety.findings import Finding
from gateway.safety.patterns import PatternError, compiled, longest_match
from gateway.safety.rules.scoring import Indicator, judge, weight_at
from gateway.safety.rules.spec import Form, RuleMatch, RuleSpec, Span, Validator
from gateway.safety.rules.stored import database_of
from gateway.safety.rules.validators import COSTLY, VALIDATORS
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

    def with_letters(self, table: bytes) -> "Subject":
        """Return a subject with the ASCII letters that `table` gives, and the same offsets."""
        other = Subject.__new__(Subject)
        other.data, other.is_single_byte = self.data.translate(table), self.is_single_byte
        other.text = other.data.decode()
        return other

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


class Prefilter:
    """Patterns compiled together. Thread-safe: each scan has a scratch space of its own."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Compile `patterns`; a pattern is known by its index."""
        self._scratches: list[hyperscan.Scratch] = []
        try:
            self._database = database_of(patterns) if patterns else None
        except hyperscan.error as error:
            # A rule of the operator was tried alone when the file was loaded.
            raise PatternError(f"the engine refuses the pattern: {error}") from None

    def present(self, data: bytes) -> Mapping[int, int]:
        """Return the patterns that occur, each with the byte offset where its first match may end."""
        ends: dict[int, int] = {}
        if data and self._database is not None:
            try:  # a space that no other scan uses; appending to a list and popping from it are atomic
                scratch = self._scratches.pop()
            except IndexError:
                scratch = hyperscan.Scratch(self._database)
            self._database.scan(data, match_event_handler=_note, context=ends, scratch=scratch)
            self._scratches.append(scratch)
        return ends


prefilter: Final = functools.lru_cache(maxsize=8)(Prefilter)
"""Returns a `Prefilter`, compiled once per set of patterns: a new policy mostly has the patterns of
the old one.
"""


def _note(pattern: int, start: int, end: int, flags: int, ends: object) -> None:
    assert isinstance(ends, dict)
    ends[pattern] = end


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
        self.width = longest_match(form.pattern)
        self._regex = compiled(form.pattern.encode())
        self._validate: Validator = VALIDATORS[spec.validator]
        self._found_max = COSTLY_FOUND_MAX if spec.validator in COSTLY else sys.maxsize
        self._context = _context_of(spec) if form.in_context else None

    def findings(self, subject: Subject, first_end: int) -> Iterator[Span]:
        """Yield the places that the validator confirms, from left to right; those of forms with a head may overlap.

        Behind a match that was refused the search goes on with the next word, because a number may
        start inside what looked like a longer one. A head may begin inside the text behind another
        one.

        Args:
            subject: the text.
            first_end: byte offset no later than the end of the first match, from the pass over all
                patterns.
        """
        data, count = subject.data, 0
        at = subject.bytes_at(max(0, subject.chars(first_end) - self.width))
        while (match := self._regex.search(data, at)) is not None:
            start, end = match.span()
            first, last = subject.chars(start), subject.chars(end)
            span: Span | None = None
            if self._in_context(subject.text, first):
                candidate = RuleMatch(subject.text, first, last, self.spec)
                span = candidate.span if count >= self._found_max else self._validate(candidate)
            if span is None:
                # Continue with the next word: a number may begin inside what looked like a longer
                # one.
                word = _WORD.match(data, start)
                at = word.end() if word else start + 1
                continue
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


Occurring = list[tuple[CompiledForm, int]]
"""Forms that occur in a text, each with a byte offset no later than the end of its first match."""


class RuleScanner:
    """One pass for all patterns, then a search with RE2 for those that occur.

    The pass has two halves: the scored patterns are also searched alone, and rarely change between
    policies.
    """

    def __init__(self, specs: Sequence[RuleSpec], extra_hints: Sequence[str] = ()) -> None:
        """Compile `specs`; `extra_hints` are patterns that others look for in the same pass."""
        forms = [CompiledForm(spec, form) for spec in specs for form in spec.forms]
        self._scored = [form for form in forms if form.form.weight]
        self._plain = [form for form in forms if not form.form.weight]
        self._scored_pass = prefilter(tuple(form.hint for form in self._scored))
        self._plain_pass = prefilter((*(form.hint for form in self._plain), *extra_hints))

    def occurring(self, subject: Subject) -> tuple[Occurring, list[int]]:
        """Return the forms that occur, and the extra hints that do."""
        scored, count = self.occurring_indicators(subject), len(self._plain)
        present = self._plain_pass.present(subject.data)
        if not present:
            return scored, []
        forms = [(self._plain[at], end) for at, end in present.items() if at < count]
        extra = sorted(at - count for at in present if at >= count)
        return scored + forms, extra

    def occurring_indicators(self, subject: Subject) -> Occurring:
        """Return the scored forms that occur. Cheaper than `occurring`."""
        present = self._scored_pass.present(subject.data)
        return [(self._scored[at], end) for at, end in present.items()]


def findings_of(subject: Subject, occurring: Occurring) -> list[Finding]:
    """Return the findings of the forms that occur in `subject`, unordered and with overlaps."""
    plain: list[Finding] = []
    indicators: list[Indicator] = []
    for form, end in occurring:
        rule, weight = form.spec.id, form.form.weight
        spans = form.findings(subject, end)
        if weight:
            indicators.extend(
                Indicator(rule, *span, weight_at(subject.text, span[0], weight)) for span in spans
            )
        else:
            plain.extend(Finding(rule, *span, form.spec.severity) for span in spans)
    return [*plain, *judge(indicators)] if indicators else plain
