"""Compiles the rules of a policy, scans texts with all of them, and resolves overlapping findings.

Findings of the content families (pii, secret, deny, custom) compete with each other, and those of injection among
themselves; limits compete with nothing. The more severe wins, then the longer, then the one further left, then the rule
id. What the winner leaves of a loser remains if it has a letter or digit: every character that a finding covered stays
covered, and by one finding only.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from gateway.safety.findings import Finding, Severity
from gateway.safety.rules.lexicon import Lexicon, ListKind, PhraseList
from gateway.safety.rules.limits import MARKS_HINT, TextLimits, limit_findings
from gateway.safety.rules.payloads import HINTS, Payloads
from gateway.safety.rules.scanner import RuleScanner, Subject
from gateway.safety.rules.spec import RuleSpec, Span


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


_NO_LIMITS = TextLimits()


class RuleSet:
    """What a policy looks for. Immutable; a scan keeps nothing, so several threads may scan."""

    def __init__(
        self,
        specs: Sequence[RuleSpec],
        *,
        phrases: Sequence[PhraseList] = (),
        limits: TextLimits = _NO_LIMITS,
        decode: bool = True,
    ) -> None:
        """Compiles; ``decode``: look into encoded payloads too. Raises `RuleError`."""
        self.specs = tuple(specs)
        self._limits = limits
        self._decode = decode
        self._scanner = RuleScanner(self.specs, (*HINTS, MARKS_HINT))
        self._lexicon = Lexicon(phrases)
        self._payloads = Payloads(self._scanner, self._lexicon)

    def scan(self, text: str) -> list[Finding]:
        """What is in ``text``, ordered by place; overlaps are settled (`gateway.safety.rules.ruleset`).

        Text after `TextLimits.chars_max` is not inspected and is one finding itself.
        """
        inspected = text[: self._limits.chars_max] if self._limits.chars_max else text
        found = list(self._found(Subject(inspected)))
        if self._lexicon.longest:
            found = self._with_lists(inspected, found)
        if len(inspected) < len(text):
            found.append(Finding("limit.length", len(inspected), len(text), Severity.CRITICAL))
        return resolved(text, found) if found else []

    def without_allowed(self, text: str, found: Iterable[Finding]) -> list[Finding]:
        """``found`` by others in ``text``, without what lies inside a phrase of an allow list."""
        matches = self._lexicon.matches(text) if self._lexicon.longest else ()
        allowed = [span for each, span in matches if each.kind is ListKind.ALLOW]
        return _without_allowed(list(found), sorted(allowed))

    def scan_hidden(self, payload: str, name: str, span: Span) -> list[Finding]:
        """What a text holds that the caller decoded, such as one of tag characters.

        The findings are called "FAMILY.encoded.NAME" and lie at ``span``, the payload's place in the text it hid in.
        """
        limited = payload[: self._limits.chars_max] if self._limits.chars_max else payload
        inside = self._payloads.inside(limited, name, span)
        return sorted(inside, key=lambda each: each.rule)

    def _found(self, subject: Subject) -> Iterator[Finding]:
        present, hints = self._scanner.look(subject)
        yield from self._scanner.findings(subject, present)
        yield from limit_findings(subject.text, self._limits, hints)
        if self._decode:
            yield from self._payloads.findings(subject, hints)
            yield from self._payloads.turned(subject)

    def _with_lists(self, text: str, found: list[Finding]) -> list[Finding]:
        allowed: list[Span] = []
        for each, span in self._lexicon.matches(text):
            if each.kind is ListKind.ALLOW:
                allowed.append(span)
            else:
                found.append(Finding(f"deny.{each.name}", *span, each.severity))
        return _without_allowed(found, sorted(allowed))


def _without_allowed(found: Sequence[Finding], allowed: Sequence[Span]) -> list[Finding]:
    """Leaves out what lies inside one allowed phrase; ``allowed`` is ordered."""
    if not allowed:
        return list(found)
    furthest = list(accumulate((end for _, end in allowed), max))

    def stands(each: Finding) -> bool:
        at = bisect_right(allowed, each.start, key=lambda span: span[0])
        return at == 0 or furthest[at - 1] < each.end or each.rule.startswith("limit.")

    return [each for each in found if stands(each)]
