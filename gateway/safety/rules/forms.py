"""One pattern of one rule, compiled, and its matches in a text."""

import re
from collections.abc import Iterator
from typing import Final

import re2

from gateway.safety.rules.candidate import Candidate, Span, Validator
from gateway.safety.rules.spec import Form, RuleError, RuleSpec
from gateway.safety.rules.subject import Subject
from gateway.safety.rules.syntax import width_of
from gateway.safety.rules.validators import VALIDATORS
from gateway.safety.rules.work import Work

_WORD: Final = re.compile(rb"[A-Za-z0-9]+")
_MEMORY_MAX: Final = (
    64 << 20
)  # bytes of automaton states per pattern; beyond it RE2 goes on without them, still linear


class CompiledForm:
    """A pattern that can be searched for."""

    def __init__(self, spec: RuleSpec, form: Form) -> None:
        """Raises `RuleError` for patterns that are not accepted."""
        self.spec = spec
        self.form = form
        self.hint = _hint_of(spec, form)
        self.width = _checked(spec, form)
        self._regex = compile_pattern(spec.id, form.pattern)
        self._validate: Validator = VALIDATORS[spec.validator]
        self._context = _context_of(spec) if form.in_context else None

    def findings(self, subject: Subject, first_end: int, work: Work) -> Iterator[Span]:
        """The places that the validator confirms, from left to right; only those of forms with a head may overlap.

        ``first_end``: a byte offset no later than the end of the first match, as the hint's pass says. Behind a
        match that was refused the search goes on with the next word, because a number may start inside what looked
        like a longer one. A head may begin inside what stood behind another one.
        """
        data = subject.data
        at = subject.back(first_end, self.width)
        while (found := self._regex.search(data, at)) is not None:
            start, end = found.span()
            work.bytes_scanned += end - at
            first, last = subject.chars(start), subject.chars(end)
            span = self._confirmed(subject.text, first, last, work)
            if span is None:
                word = _WORD.match(data, start)
                at = word.end() if word else start + 1
                continue
            yield span
            behind = span[0] if self.form.head else span[1]
            at = max(start + 1, subject.bytes_at(behind, start, first))
        work.bytes_scanned += len(data) - at

    def _confirmed(self, text: str, start: int, end: int, work: Work) -> Span | None:
        work.candidates += 1
        if self._context is not None and not self._in_context(text, start):
            return None
        return self._validate(Candidate(text, start, end, self.spec, work))

    def _in_context(self, text: str, start: int) -> bool:
        assert self._context is not None
        return (
            self._context.search(text, max(0, start - self.spec.context_chars), start) is not None
        )


def compile_pattern(rule: str, pattern: str) -> "re2._Regexp[bytes]":
    """``pattern`` for UTF-8 bytes. Raises `RuleError`."""
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = _MEMORY_MAX
    try:
        return re2.compile(pattern.encode(), options=options)
    except re2.error as error:
        raise RuleError(rule, f"the engine refuses the pattern: {error}", 0) from None


def _checked(spec: RuleSpec, form: Form) -> int:
    """The longest match, in characters."""
    width = width_of(spec.id, form.pattern)
    if width.most > spec.max_length:
        raise RuleError(
            spec.id,
            f"matches of up to {width.most} characters exceed max_length {spec.max_length}",
            0,
        )
    if form.hint:
        width_of(spec.id, form.hint)
    if form.in_context and not spec.context:
        raise RuleError(spec.id, "a form in context needs context words")
    if spec.validator not in VALIDATORS:
        raise RuleError(spec.id, f"no validator is called {spec.validator!r}")
    return width.most


def _hint_of(spec: RuleSpec, form: Form) -> str:
    """What occurs in every text with a match: a context word is rarer than digits, and cheaper to look for."""
    if form.in_context and not form.hint:
        return "(?i)" + "|".join(map(re.escape, spec.context))
    return form.hint or form.pattern


def _context_of(spec: RuleSpec) -> re.Pattern[str]:
    """Plain words only, so the standard library's engine is linear here."""
    words = "|".join(re.escape(word) for word in spec.context)
    return re.compile(rf"(?<![^\W_])(?:{words})", re.IGNORECASE)
