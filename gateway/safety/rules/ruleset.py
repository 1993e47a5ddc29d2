"""Compiles the rules of a policy, scans texts with all of them, and resolves overlapping findings.

`Prefilter` is one pass of Vectorscan (block mode) that tells which patterns occur at all. Each
pattern reports once at most, so hostile text costs the same as any other. It may report a pattern
that does not occur (large repeats are approximated), never the other way round.

Findings of the content families (pii, secret, deny, custom) compete with each other, and those of
injection among themselves; limits compete with nothing. The more severe wins, then the longer, then
the one further left, then the rule id. What the winner leaves of a loser remains if it has a letter
or digit: every character that a finding covered stays covered, and by one finding only.
"""

import functools
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import hyperscan

from gateway.safety.findings import BY_PLACE, Finding, Severity
from gateway.safety.patterns import PatternError
from gateway.safety.rules.lexicon import NO_LISTS, Lexicon
from gateway.safety.rules.limits import CHARS_MAX, RUN_CHARS_MAX, repetitions
from gateway.safety.rules.payloads import HINTS, ROT13, Payloads
from gateway.safety.rules.scanner import CompiledForm, Occurring, Subject, findings_of
from gateway.safety.rules.spec import RuleSpec, Span
from gateway.safety.rules.stored import database_of


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


Present = Mapping[int, int]
"""Patterns that occur in a text, by index, each with the byte offset where its first match may end."""


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

    def present(self, data: bytes) -> Present:
        """Return the patterns that occur in `data`."""
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


class RuleSet:
    """The rules of a policy, compiled. Immutable, and a scan keeps no state, so several threads may scan."""

    def __init__(
        self,
        specs: Sequence[RuleSpec],
        lists: Lexicon = NO_LISTS,
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
        forms = [CompiledForm(spec, form) for spec in self.specs for form in spec.forms]
        # Two passes: scored patterns are also searched alone, and rarely change between policies.
        self._scored = [form for form in forms if form.form.weight]
        self._plain = [form for form in forms if not form.form.weight]
        self._scored_pass = prefilter(tuple(form.hint for form in self._scored))
        self._plain_pass = prefilter((*(form.hint for form in self._plain), *HINTS))
        self._payloads = Payloads(self._search)

    def scan(self, text: str) -> list[Finding]:
        """Return the findings in `text`, ordered by place and without overlaps.

        Text behind the limit is not inspected and is a finding itself.
        """
        inspected = text[: self._longest]
        subject = None if inspected.isascii() else Subject(inspected)
        data = inspected.encode() if subject is None else subject.data
        scored, plain = self._scored_pass.present(data), self._plain_pass.present(data)
        # Rot13 has no runs to look for: injections that show when the whole text is turned.
        turned = self._scored_pass.present(data.translate(ROT13)) if self._is_prompt else {}
        # The usual case: nothing occurs that could become a finding.
        if not (scored or plain or turned or self._has_lists or len(text) > RUN_CHARS_MAX):
            return []
        subject = subject or Subject(inspected)
        findings = findings_of(subject, self._occurring(scored, plain))
        if self._is_prompt:
            findings += self._of_prompts(subject, plain, turned)
        if self._has_lists:
            findings = self.lists.applied(inspected, findings)
        if len(inspected) < len(text):
            findings.append(Finding("limit.length", len(inspected), len(text), Severity.CRITICAL))
        return resolved(text, findings)

    def scan_hidden(self, payload: str, name: str, span: Span) -> list[Finding]:
        """Return the findings in a text that the caller decoded, such as one of tag characters.

        They are called "FAMILY.encoded.NAME" and lie at `span`, the place of the payload.
        """
        inside = self._payloads.inside(payload[: self._longest], name, span)
        return sorted(inside, key=lambda finding: finding.rule)

    def _of_prompts(self, subject: Subject, plain: Present, turned: Present) -> Iterator[Finding]:
        """Yield what is looked for in prompts alone: repetitions and encoded text."""
        if len(subject.text) > RUN_CHARS_MAX:
            for span in repetitions(subject.text):
                yield Finding("limit.repetition", *span, Severity.MEDIUM)
        yield from self._payloads.findings(subject, self._hints(plain))
        # Only injections, because a turned text holds no numbers or keys.
        if turned:
            for finding in findings_of(subject.with_letters(ROT13), self._occurring(turned, {})):
                if finding.severity >= Severity.HIGH:
                    rule = "injection.encoded.rot13"
                    yield Finding(rule, finding.start, finding.end, Severity.HIGH)

    def _search(self, subject: Subject) -> tuple[list[Finding], list[int]]:
        """Return the findings in the text of a payload, and the hints of payloads inside it."""
        scored = self._scored_pass.present(subject.data)
        plain = self._plain_pass.present(subject.data)
        findings = findings_of(subject, self._occurring(scored, plain))
        return [*findings, *self.lists.denied(subject.text)], self._hints(plain)

    def _occurring(self, scored: Present, plain: Present) -> Occurring:
        forms = [(self._scored[at], end) for at, end in scored.items()]
        return forms + [
            (self._plain[at], end) for at, end in plain.items() if at < len(self._plain)
        ]

    def _hints(self, plain: Present) -> list[int]:
        return sorted(at - len(self._plain) for at in plain if at >= len(self._plain))
