"""All rules of a policy, compiled once, and the scan of a text with all of them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from gateway.safety.findings import Finding, Severity
from gateway.safety.rules.candidate import Span
from gateway.safety.rules.lexicon import Lexicon, ListKind, PhraseList
from gateway.safety.rules.limits import MARKS_HINT, Limits, limit_findings
from gateway.safety.rules.overlaps import resolved
from gateway.safety.rules.payloads import HINTS, Payloads
from gateway.safety.rules.scanner import Scanner
from gateway.safety.rules.spec import RuleSpec
from gateway.safety.rules.subject import Subject
from gateway.safety.rules.work import Work

_NO_LIMITS = Limits()


class RuleSet:
    """What a policy looks for. Immutable; a scan keeps nothing. Not for two threads at once."""

    def __init__(
        self,
        specs: Sequence[RuleSpec],
        *,
        phrases: Sequence[PhraseList] = (),
        limits: Limits = _NO_LIMITS,
        decode: bool = True,
    ) -> None:
        """Compiles; ``decode``: look into encoded payloads too. Raises `RuleError`."""
        self.specs = tuple(specs)
        self._limits = limits
        self._decode = decode
        self._scanner = Scanner(self.specs, (*HINTS, MARKS_HINT))
        self._lexicon = Lexicon(phrases)
        self._payloads = Payloads(self._scanner, self._lexicon)

    def scan(self, text: str, work: Work | None = None) -> list[Finding]:
        """What is in ``text``, ordered by place; overlaps are settled (`gateway.safety.rules.overlaps`).

        ``work`` counts what was done. Text behind `Limits.chars_max` is not looked at and is one finding itself.
        """
        work = Work() if work is None else work
        inspected = text[: self._limits.chars_max] if self._limits.chars_max else text
        found = list(self._found(Subject(inspected), work))
        if self._lexicon.longest:
            found = self._with_lists(inspected, found, work)
        if len(inspected) < len(text):
            found.append(Finding("limit.length", len(inspected), len(text), Severity.CRITICAL))
        return resolved(text, found) if found else []

    def scan_hidden(
        self, payload: str, name: str, span: Span, work: Work | None = None
    ) -> list[Finding]:
        """What a text holds that the caller decoded, such as one of tag characters.

        The findings are called "FAMILY.encoded.NAME" and lie at ``span``, the payload's place in the text it hid in.
        """
        limited = payload[: self._limits.chars_max] if self._limits.chars_max else payload
        inside = self._payloads.inside(limited, name, span, Work() if work is None else work)
        return sorted(inside, key=lambda each: each.rule)

    def _found(self, subject: Subject, work: Work) -> Iterator[Finding]:
        present, hints = self._scanner.look(subject, work)
        yield from self._scanner.findings(subject, present, work)
        yield from limit_findings(subject.text, self._limits, hints)
        if self._decode:
            yield from self._payloads.findings(subject, hints, work)
            yield from self._payloads.turned(subject, work)

    def _with_lists(self, text: str, found: list[Finding], work: Work) -> list[Finding]:
        allowed: list[Span] = []
        for each, span in self._lexicon.matches(text, work):
            if each.kind is ListKind.ALLOW:
                allowed.append(span)
            else:
                found.append(Finding(f"deny.{each.name}", *span, each.severity))
        return _without_allowed(found, sorted(allowed)) if allowed else found


def _without_allowed(found: Sequence[Finding], allowed: Sequence[Span]) -> list[Finding]:
    """Leaves out what lies inside one allowed phrase; ``allowed`` is ordered."""
    furthest = list(accumulate((end for _, end in allowed), max))

    def stands(each: Finding) -> bool:
        at = bisect_right(allowed, each.start, key=lambda span: span[0])
        return at == 0 or furthest[at - 1] < each.end or each.rule.startswith("limit.")

    return [each for each in found if stands(each)]
