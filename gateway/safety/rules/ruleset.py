"""Compiles the rules of a policy, scans texts with all of them, and resolves overlapping findings.

Findings of the content families (pii, secret, deny, custom) compete with each other, and those of
injection among themselves; limits compete with nothing. The more severe wins, then the longer, then
the one further left, then the rule id. What the winner leaves of a loser remains if it has a letter
or digit: every character that a finding covered stays covered, and by one finding only.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gateway.safety.findings import BY_PLACE, Finding, Severity
from gateway.safety.rules.lexicon import Lexicon
from gateway.safety.rules.limits import CHARS_MAX, RUN_CHARS_MAX, repetitions
from gateway.safety.rules.payloads import HINTS, ROT13, Payloads
from gateway.safety.rules.scanner import RuleScanner, Subject, findings_of
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
    covered: list[tuple[int, int]] = []  # disjoint, ordered
    for finding in sorted(findings, key=_rank):
        # Of the rest of a loser, punctuation alone tells nothing.
        for start, end in _left_over(covered, finding.start, finding.end):
            whole = (start, end) == (finding.start, finding.end)
            if whole or any(char.isalnum() for char in text[start:end]):
                covered.insert(bisect_left(covered, (start, end)), (start, end))
                yield Finding(finding.rule, start, end, finding.severity)


def _rank(finding: Finding) -> tuple[int, int, int, str]:
    """Order findings by severity, then length, then place, then rule."""
    return -finding.severity, finding.start - finding.end, finding.start, finding.rule


def _left_over(covered: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return the parts of a span that no other finding covers."""
    at = max(0, bisect_left(covered, (start, start)) - 1)
    parts = []
    while at < len(covered) and covered[at][0] < end:
        low, high = covered[at]
        if low > start:
            parts.append((start, low))
        start = max(start, high)
        at += 1
    if start < end:
        parts.append((start, end))
    return parts


_NO_LISTS: Final = Lexicon()


class RuleSet:
    """The rules of a policy, compiled. Immutable, and a scan keeps no state, so several threads may scan."""

    def __init__(
        self,
        specs: Sequence[RuleSpec],
        lists: Lexicon = _NO_LISTS,
        max_chars: int | None = CHARS_MAX,
    ) -> None:
        """Compile the rules; raises `PatternError` if a pattern is not accepted.

        `max_chars` is None for answers, which are neither limited nor decoded.
        """
        self.specs = tuple(specs)
        self.lists = lists
        self._has_lists = bool(lists)
        self._is_prompt = max_chars is not None
        self._longest = sys.maxsize if max_chars is None else max_chars
        self._scanner = RuleScanner(self.specs, HINTS)
        self._payloads = Payloads(self._scanner, lists)

    def scan(self, text: str) -> list[Finding]:
        """Return the findings in `text`, ordered by place and without overlaps.

        Text behind the limit is not inspected and is a finding itself.
        """
        inspected = text[: self._longest]
        findings = self._findings(Subject(inspected))
        if self._has_lists:
            findings = self.lists.applied(inspected, findings)
        if len(inspected) < len(text):
            findings.append(Finding("limit.length", len(inspected), len(text), Severity.CRITICAL))
        return resolved(text, findings) if findings else findings

    def scan_hidden(self, payload: str, name: str, span: Span) -> list[Finding]:
        """Return the findings in a text that the caller decoded, such as one of tag characters.

        They are called "FAMILY.encoded.NAME" and lie at `span`, the place of the payload.
        """
        inside = self._payloads.inside(payload[: self._longest], name, span)
        return sorted(inside, key=lambda finding: finding.rule)

    def _findings(self, subject: Subject) -> list[Finding]:
        present, hints = self._scanner.occurring(subject)
        findings = findings_of(subject, present) if present else []
        if self._is_prompt:
            if len(subject.text) > RUN_CHARS_MAX:
                for span in repetitions(subject.text):
                    findings.append(Finding("limit.repetition", *span, Severity.MEDIUM))
            if hints:
                findings += self._payloads.findings(subject, hints)
            turned = subject.with_letters(ROT13)
            # Rot13 has no runs to look for: injections that show when the whole text is turned.
            # Only injections, because a turned text holds no numbers or keys.
            signs = self._scanner.occurring_indicators(turned)
            for finding in findings_of(turned, signs) if signs else ():
                if finding.severity >= Severity.HIGH:
                    rule = "injection.encoded.rot13"
                    findings.append(Finding(rule, finding.start, finding.end, Severity.HIGH))
        return findings
