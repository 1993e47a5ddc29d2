"""Compiles the rules of a policy, scans texts with all of them, and resolves overlapping findings.

Findings of the content families (pii, secret, deny, custom) compete with each other, and those of injection among
themselves; limits compete with nothing. The more severe wins, then the longer, then the one further left, then the rule
id. What the winner leaves of a loser remains if it has a letter or digit: every character that a finding covered stays
covered, and by one finding only.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gateway.safety.findings import Finding, Severity
from gateway.safety.rules.lexicon import Lexicon
from gateway.safety.rules.limits import repetitions
from gateway.safety.rules.payloads import HINTS, ROT13, Payloads
from gateway.safety.rules.scanner import RuleScanner, Subject, findings_of
from gateway.safety.rules.spec import RuleSpec, Span
from gateway.safety.settings import LimitSettings


def resolved(text: str, findings: Iterable[Finding]) -> list[Finding]:
    """The findings that stand, ordered by place."""
    groups: dict[str, list[Finding]] = {"limit": [], "injection": [], "content": []}
    for each in findings:
        family = each.rule.split(".", 1)[0]
        groups[family if family in groups else "content"].append(each)
    standing = [
        *groups["limit"],
        *_winners(text, groups["injection"]),
        *_winners(text, groups["content"]),
    ]
    return sorted(standing, key=lambda each: (each.start, each.end, each.rule))


def _winners(text: str, findings: list[Finding]) -> Iterator[Finding]:
    if len(findings) < 2:
        yield from findings
        return
    taken: list[tuple[int, int]] = []  # disjoint, ordered
    for each in sorted(
        findings, key=lambda each: (-each.severity, each.start - each.end, each.start, each.rule)
    ):
        for start, end in _left_over(taken, each.start, each.end):
            whole = (start, end) == (each.start, each.end)
            if whole or any(char.isalnum() for char in text[start:end]):
                taken.insert(bisect_left(taken, (start, end)), (start, end))
                yield Finding(each.rule, start, end, each.severity)


def _left_over(taken: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of a span that no other finding covers."""
    at = max(0, bisect_left(taken, (start, start)) - 1)
    parts = []
    while at < len(taken) and taken[at][0] < end:
        low, high = taken[at]
        if low > start:
            parts.append((start, low))
        start = max(start, high)
        at += 1
    if start < end:
        parts.append((start, end))
    return parts


_NO_LISTS: Final = Lexicon()
_LIMITS: Final = LimitSettings()


class RuleSet:
    """What a policy looks for. Immutable; a scan keeps nothing, so several threads may scan."""

    def __init__(
        self,
        specs: Sequence[RuleSpec],
        lists: Lexicon = _NO_LISTS,
        limits: LimitSettings | None = _LIMITS,
    ) -> None:
        """Compiles. ``limits``: None for answers, which are neither limited nor decoded. Raises `PatternError`."""
        self.specs = tuple(specs)
        self.lists = lists
        self._has_lists = bool(lists)
        self._limits = limits
        self._longest = sys.maxsize if limits is None else limits.max_chars
        self._scanner = RuleScanner(self.specs, HINTS)
        self._payloads = Payloads(self._scanner, lists)

    def scan(self, text: str) -> list[Finding]:
        """What is in ``text``, ordered by place; overlaps are settled (`gateway.safety.rules.ruleset`).

        Text after the limit is not inspected and is one finding itself.
        """
        inspected = text[: self._longest]
        found = self._found(Subject(inspected))
        if self._has_lists:
            found = self.lists.applied(inspected, found)
        if len(inspected) < len(text):
            found.append(Finding("limit.length", len(inspected), len(text), Severity.CRITICAL))
        return resolved(text, found) if found else found

    def scan_hidden(self, payload: str, name: str, span: Span) -> list[Finding]:
        """What a text holds that the caller decoded, such as one of tag characters.

        The findings are called "FAMILY.encoded.NAME" and lie at ``span``, the payload's place in the text it hid in.
        """
        inside = self._payloads.inside(payload[: self._longest], name, span)
        return sorted(inside, key=lambda each: each.rule)

    def _found(self, subject: Subject) -> list[Finding]:
        present, hints = self._scanner.occurring(subject)
        found = findings_of(subject, present) if present else []
        if self._limits is not None:
            if len(subject.text) > self._limits.max_run_chars:
                for span in repetitions(subject.text, self._limits.max_run_chars):
                    found.append(Finding("limit.repetition", *span, Severity.MEDIUM))
            if hints:
                found += self._payloads.findings(subject, hints)
            turned = subject.with_letters(ROT13)
            # Rot13 has no runs to look for: injections that show when the whole text is turned.
            signs = self._scanner.occurring_indicators(turned)
            for each in findings_of(turned, signs) if signs else ():
                if each.severity >= Severity.HIGH:
                    rule = "injection.encoded.rot13"
                    found.append(Finding(rule, each.start, each.end, Severity.HIGH))
        return found
