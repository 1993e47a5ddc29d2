"""Compiles the rules of a policy, scans texts with all of them, and resolves overlapping findings.

One pass of RE2 tells which rules may match at all, by hints that are cheaper than their patterns;
only these are searched.

Findings of the content families (pii, secret, deny, custom) compete with each other, and those of
injection among themselves; limits compete with nothing. The more severe wins, then the longer, then
the one further left, then the rule id. What the winner leaves of a loser remains if it has a letter
or digit: every character that a finding covered stays covered, and by one finding only.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

import re2

from gateway.safety.findings import BY_PLACE, Finding, Severity
from gateway.safety.patterns import set_of
from gateway.safety.rules.lexicon import NO_LISTS, Lexicon
from gateway.safety.rules.payloads import (
    ANY_RUN,
    ROT13,
    RUN_CHARS_MAX,
    is_nested,
    payloads_of,
    repetitions,
)
from gateway.safety.rules.scanner import CompiledForm, Subject, findings_of
from gateway.safety.rules.spec import RuleSpec, Span


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
        """Return the findings in `text`, ordered by place and without overlaps."""
        subject = Subject(text)
        findings = findings_of(subject, self._occurring(subject.data))
        if self._is_prompt:
            findings += self._of_prompts(subject)
        if not self.lists.is_empty:
            findings += self.lists.denied(text)
            findings = self.lists.without_allowed(text, findings)
        return resolved(text, findings) if findings else []

    def scan_hidden(self, payload: str, name: str, span: Span) -> list[Finding]:
        """Return the findings in a decoded text, one per family, at the place of the payload.

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
        if is_nested(subject):
            findings.append(Finding("injection.encoded.nested", *span, Severity.MEDIUM))
        return findings

    def _of_prompts(self, subject: Subject) -> Iterator[Finding]:
        """Yield what is looked for in prompts alone: repetitions and encoded text."""
        if len(subject.text) > RUN_CHARS_MAX:
            for span in repetitions(subject.text):
                yield Finding("limit.repetition", *span, Severity.MEDIUM)
        for payload in payloads_of(subject) if ANY_RUN.search(subject.data) else ():
            if payload.text:
                yield from self.scan_hidden(payload.text, payload.encoding, payload.span)
            if payload.is_cut:
                yield Finding("limit.encoded", *payload.span, Severity.MEDIUM)
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
