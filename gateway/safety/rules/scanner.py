"""Searches a text for the places of single patterns; decoding and lists are up to `RuleSet`.

`Subject` is the text as characters and as UTF-8: RE2 matches bytes, findings count
characters. Digits of other scripts and the many dashes are folded to ASCII one for one, so that
offsets stay.
"""

import re
import sys
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from gateway.safety.findings import BY_PLACE, Finding, Severity
from gateway.safety.patterns import compiled
from gateway.safety.rules.spec import Form, RuleMatch, RuleSpec, Span, Validator
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
        self._context = _context_of(spec) if form.in_context else None

    def findings(self, subject: Subject) -> Iterator[Span]:
        """Yield the places that the validator confirms, from left to right; those of forms with a head may overlap.

        Behind a match that was refused the search goes on with the next word, because a number may
        start inside what looked like a longer one. A head may begin inside the text behind another
        one.
        """
        data, count, at = subject.data, 0, 0
        while (match := self._regex.search(data, at)) is not None:
            start, end = match.span()
            first, last = subject.chars(start), subject.chars(end)
            result: Span | bool | None = None
            if self._in_context(subject.text, first):
                candidate = RuleMatch(subject.text, first, last, self.spec)
                result = count >= self._found_max or self._validate(candidate)
            if not result:
                # Continue with the next word: a number may begin inside what looked like a longer
                # one.
                word = _WORD.match(data, start)
                at = word.end() if word else start + 1
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


# Scores of the indicators of prompt injection.

NEAR_CHARS: Final = 400
"""Distance within which indicators count together, in characters."""
MENTION_DISCOUNT: Final = 2
"""Weight that an indicator loses if it is only mentioned."""

_MENTION_CHARS: Final = 120
_OPENING_QUOTES: Final = frozenset("\"'“”„«‘‚`‹「『")
_MENTION: Final = re.compile(
    r"(?<!\w)(?:prompt.injections?|jailbreak(?:s|ing)?|attack(?:s|ers?)?|adversarial|phrases?|such as|e\.g\."
    r"|for example|examples?|detect(?:s|ion|ing)?|red.team(?:ing)?|blog post|paper|researchers?|wrote|written|called"
    r"|angriff(?:e|en)?|zum beispiel|z\. ?b\.|attaques?|par exemple|ataques?|por ejemplo)(?!\w)",
    re.IGNORECASE,
)
_LADDER: Final = (
    (5, Severity.CRITICAL),
    (3, Severity.HIGH),
    (2, Severity.MEDIUM),
    (0, Severity.LOW),
)


@dataclass(frozen=True, slots=True)
class Indicator:
    """A scored form that matched."""

    rule: str
    start: int
    end: int
    weight: int


def weight_at(text: str, start: int, weight: int) -> int:
    """Return the weight of an indicator at `start`, less its discount if it is only mentioned."""
    before = text[max(0, start - _MENTION_CHARS) : start]
    if before.rstrip()[-1:] in _OPENING_QUOTES or _MENTION.search(before):
        return max(1, weight - MENTION_DISCOUNT)
    return weight


def judge(indicators: Sequence[Indicator]) -> Iterator[Finding]:
    """Yield one finding per indicator, with the severity of its neighbourhood. Linear but for the sort."""
    ordered = sorted(indicators, key=BY_PLACE)
    near: deque[Indicator] = deque()
    ahead = iter(ordered)
    waiting = next(ahead, None)
    for indicator in ordered:
        while waiting is not None and waiting.start <= indicator.end + NEAR_CHARS:
            near.append(waiting)
            waiting = next(ahead, None)
        # A window slides along, so each indicator enters and leaves it once.
        while near and near[0].start < indicator.start - NEAR_CHARS:
            near.popleft()
        yield Finding(indicator.rule, indicator.start, indicator.end, _severity(near))


def _severity(near: deque[Indicator]) -> Severity:
    heaviest: dict[str, int] = {}
    for indicator in near:
        heaviest[indicator.rule] = max(indicator.weight, heaviest.get(indicator.rule, 0))
    score = sum(heaviest.values())
    return next(severity for least, severity in _LADDER if score >= least)


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
