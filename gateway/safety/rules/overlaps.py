"""Which of several findings at the same place stand.

Findings of the content families (pii, secret, deny and the operator's own) compete with each other, those of
injection among themselves; limits stand beside everything. The more severe wins, then the longer, then the one
further left, then the rule id. What the winner leaves of a loser stays, as long as it has a letter or digit: every
character that anybody claimed stays claimed, and no character is claimed twice.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from gateway.safety.findings import Finding


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
    """The parts of a span that nobody has taken."""
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
