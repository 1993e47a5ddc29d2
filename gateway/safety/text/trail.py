"""A text on its way through the steps of normalization: what it is now, how it came there, what was found."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.safety.findings import Finding, Severity
from gateway.safety.text.offsets import Edit, OffsetMap

FINDINGS_MAX = 32
"""Findings kept apart for one rule and severity; one more stands for all that follow."""
MATCHES_MAX = 1024
"""Matches of one rule and severity that are looked at; those side by side make one finding."""


@dataclass(frozen=True, slots=True)
class Normalized:
    """The model's view of a text."""

    text: str
    """What goes on: to the rules, to the tokenizer."""
    findings: Sequence[Finding]
    """What was changed or noticed, with offsets in the original text, by start. Bounded (see `FINDINGS_MAX`)."""
    maps: Sequence[OffsetMap] = ()
    """From each step back to the one before it, in the order in which the steps were taken."""

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """The span of the original text that ``text[start:end]`` was made of."""
        return _back(self.maps, start, end)


class Trail:
    """The text between two steps. Steps read `text`, then `advance` it and `flag` what they found."""

    def __init__(self, original: str) -> None:
        self.text = original
        self._original = original
        self._maps: list[OffsetMap] = []
        self._flagged: Counter[tuple[str, Severity]] = Counter()
        self._spans: dict[tuple[str, Severity], list[list[int]]] = {}

    def advance(self, text: str, edits: Callable[[], Iterable[Edit]] | None = None) -> None:
        """``text`` takes the place of the text so far.

        ``edits`` gives the difference when somebody asks for offsets; without it characters were replaced one by one.
        """
        self.text = text
        if edits is not None:
            self._maps.append(OffsetMap(edits))

    def cut(self, spans: Sequence[tuple[int, int]]) -> None:
        """Takes ``spans`` of `text` out, which come in order."""
        if not spans:
            return
        kept = []
        position = 0
        for start, end in spans:
            kept.append(self.text[position:start])
            position = end
        kept.append(self.text[position:])
        self.advance("".join(kept), lambda: (Edit(start, end, 0) for start, end in spans))

    def flag(self, rule: str, start: int, end: int, severity: Severity) -> bool:
        """Notes a finding at a span of `text`. False once the rule had its share: then `flag_rest`, and no more."""
        start, end = _back(self._maps, start, end)
        self._flagged[rule, severity] += 1
        spans = self._spans.setdefault((rule, severity), [])
        if spans and spans[-1][0] <= start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
        return len(spans) < FINDINGS_MAX and self._flagged[rule, severity] < MATCHES_MAX

    def flag_rest(self, rule: str, start: int, severity: Severity) -> None:
        """Notes that a rule found too much to be listed from ``start`` of `text` to its end."""
        start, _ = _back(self._maps, start, start)
        self._spans.setdefault((rule, severity), []).append([start, len(self._original)])

    def flag_whole(self, rule: str, severity: Severity) -> None:
        """Notes a finding about all of the original text."""
        self._spans[rule, severity] = [[0, len(self._original)]]

    def normalized(self) -> Normalized:
        """Where the trail ended."""
        if not self._spans and not self._maps:
            return Normalized(self.text, ())
        findings = [
            Finding(rule, start, end, severity)
            for (rule, severity), spans in self._spans.items()
            for start, end in spans
        ]
        findings.sort(key=lambda finding: (finding.start, finding.end, finding.rule))
        return Normalized(self.text, tuple(findings), tuple(self._maps))


def _back(maps: Sequence[OffsetMap], start: int, end: int) -> tuple[int, int]:
    """A span behind all ``maps``, before all of them."""
    for step in reversed(maps):
        start, end = step.span_before(start, end)
    return start, end
