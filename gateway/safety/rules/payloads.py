"""Decodes what hides in a text and scans it once more with the same rules."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import re2

from gateway.safety.findings import Finding, Severity
from gateway.safety.rules.candidate import Span
from gateway.safety.rules.encodings import ENCODINGS, Budget, payload_of, rot13
from gateway.safety.rules.forms import compile_pattern
from gateway.safety.rules.lexicon import Lexicon
from gateway.safety.rules.scanner import Scanner
from gateway.safety.rules.subject import Subject
from gateway.safety.rules.work import Work

HINTS: Final = tuple((f"encoding.{encoding.name}", encoding.hint) for encoding in ENCODINGS)
"""What the scanner has to look out for on behalf of this module."""

_NESTED_SHARE: Final = 0.8


class Payloads:
    """The encodings, compiled once."""

    def __init__(self, scanner: Scanner, lexicon: Lexicon) -> None:
        self._scanner = scanner
        self._lexicon = lexicon
        self._runs = [(f"encoding.{e.name}", e, compile_pattern(e.name, e.run)) for e in ENCODINGS]

    def findings(self, subject: Subject, hints: Iterable[str], work: Work) -> list[Finding]:
        """What hides in ``subject``; ``hints`` of `Scanner.look` say which encodings occur."""
        present, budget = frozenset(hints), Budget()
        found: list[Finding] = []
        for hint, encoding, regex in self._runs:
            if hint not in present:
                continue
            for run, span in _runs_in(subject, regex, work):
                payload = payload_of(encoding, run, budget)
                if payload:
                    found.extend(self.inside(payload, encoding.name, span, work))
                if budget.cut:
                    found.append(Finding("limit.encoded", *span, Severity.MEDIUM))
                    budget.cut = False
                if budget.left <= 0:
                    return found
        return found

    def turned(self, subject: Subject, work: Work) -> list[Finding]:
        """Injections in rot13, which has no runs to look for."""
        other = Subject.of_ascii_folding(subject, rot13(subject.data))
        inner = self._scanner.findings(other, self._scanner.look_for_signs(other, work), work)
        hidden = [each for each in inner if each.severity >= Severity.HIGH]
        return [
            Finding("injection.encoded.rot13", each.start, each.end, Severity.HIGH)
            for each in hidden
        ]

    def inside(self, payload: str, name: str, span: Span, work: Work) -> Iterator[Finding]:
        """What a decoded text holds, one finding per family, at the place of the run."""
        subject = Subject(payload)
        work.bytes_decoded += len(subject.data)
        present, hints = self._scanner.look(subject, work)
        inner = self._scanner.findings(subject, present, work)
        inner.extend(self._lexicon.denied(subject.text, work))
        for family, severity in _families(inner):
            yield Finding(f"{family}.encoded.{name}", *span, severity)
        if self._is_nested(subject, hints, work):
            yield Finding("injection.encoded.nested", *span, Severity.MEDIUM)

    def _is_nested(self, subject: Subject, hints: frozenset[str], work: Work) -> bool:
        total = len(subject.data) * _NESTED_SHARE
        return any(
            len(run) >= total
            for hint, _, regex in self._runs
            if hint in hints
            for run, _ in _runs_in(subject, regex, work)
        )


def _runs_in(
    subject: Subject, regex: "re2._Regexp[bytes]", work: Work
) -> Iterator[tuple[bytes, Span]]:
    work.bytes_scanned += len(subject.data)
    for found in regex.finditer(subject.data):
        start, end = found.span()
        yield subject.data[start:end], (subject.chars(start), subject.chars(end))


def _families(inner: Sequence[Finding]) -> Iterator[tuple[str, Severity]]:
    """The families worth telling, with their worst severity; an injection that hides is no accident."""
    worst: dict[str, Severity] = {}
    for each in inner:
        family = each.rule.split(".", 1)[0]
        worst[family] = max(each.severity, worst.get(family, Severity.LOW))
    for family, severity in worst.items():
        if severity >= Severity.MEDIUM:
            yield family, max(severity, Severity.HIGH) if family == "injection" else severity
