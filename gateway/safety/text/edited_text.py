"""A text between the steps of normalization: the current text, the maps to original offsets, and the findings.

An edit says that `before[start:end]` became `length` characters. Everything between edits is
copied.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from gateway.safety.findings import BY_PLACE, Finding, Severity


class OffsetEdit(NamedTuple):
    """`before[start:end]` became `length` characters. In order, and never overlapping."""

    start: int
    end: int
    length: int


class OffsetMap:
    """Maps offsets behind a list of edits back to offsets before them."""

    def __init__(self, edits: Iterable[OffsetEdit]) -> None:
        self._placed: list[tuple[int, OffsetEdit]] = []
        """Edits, each with its start after the edits before it."""
        shift = 0
        for edit in edits:
            self._placed.append((edit.start + shift, edit))
            shift += edit.length - (edit.end - edit.start)

    def span_before(self, start: int, end: int) -> tuple[int, int]:
        """Return the span before the edits that holds all that `start` to `end` was made of.

        Text that was removed inside the span belongs to it, text that was removed beside it does
        not. An empty span stays empty.
        """
        first, _ = self._character(start)
        return first, first if end <= start else self._character(end - 1)[1]

    def _character(self, offset: int) -> tuple[int, int]:
        """Return the span before the edits that the character at `offset` was made of."""
        index = bisect_right(self._placed, offset, key=itemgetter(0)) - 1
        if index < 0:
            return offset, offset + 1
        place, edit = self._placed[index]
        if offset < place + edit.length:
            return edit.start, edit.end
        before = offset - place - edit.length + edit.end
        return before, before + 1


FINDINGS_MAX = 32
"""Findings that are listed for one rule and severity; one more stands for all that follow."""
MATCHES_MAX = 1024
"""Matches of one rule and severity that are listed; adjacent ones make one finding."""


@dataclass(frozen=True, slots=True)
class Normalized:
    """The normalized text, with its findings."""

    text: str
    """Text for the rules and the tokenizer."""
    findings: Sequence[Finding]
    """What was changed or noticed, with offsets in the original text, by start. Bounded (see
    `FINDINGS_MAX`).
    """
    maps: Sequence[OffsetMap] = ()
    """Maps from each step back to the one before it, in the order of the steps."""

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the span of the original text that `text[start:end]` was made of."""
        return _back(self.maps, start, end)


class EditedText:
    """The text between two steps. Steps read `text`, then `advance` it and `flag` their findings."""

    def __init__(self, original: str) -> None:
        self.text = original
        self._original = original
        self._maps: list[OffsetMap] = []
        self._flagged: Counter[tuple[str, Severity]] = Counter()
        self._spans: dict[tuple[str, Severity], list[list[int]]] = {}

    def advance(self, text: str, edits: Sequence[OffsetEdit] = ()) -> None:
        """Replace the whole text by one that differs by `edits`, and in single characters."""
        self.text = text
        if edits:
            self._maps.append(OffsetMap(edits))

    def replace(self, spans: Iterable[tuple[int, int]], shown: Callable[[str], str]) -> None:
        """Replace sorted `spans` of `text` by what `shown` returns for them."""
        parts, edits, position = [], [], 0
        for start, end in spans:
            new = shown(self.text[start:end])
            parts += [self.text[position:start], new]
            edits.append(OffsetEdit(start, end, len(new)))
            position = end
        self.advance("".join([*parts, self.text[position:]]), edits)

    def remove(self, spans: Iterable[tuple[int, int]]) -> None:
        """Remove sorted `spans` of `text`."""
        self.replace(spans, lambda _: "")

    def flag(self, rule: str, start: int, end: int, severity: Severity) -> bool:
        """Note a finding at a span of `text`; spans come in order.

        Returns:
            False once the rule has reached its bound; one more finding then stands for all that
                follow.
        """
        key = rule, severity
        start, end = _back(self._maps, start, end)
        if self._flagged[key] >= MATCHES_MAX:
            rest = self._spans[key][-1]
            rest[0] = min(rest[0], start)  # a later step begins at the beginning of the text again
            return False
        self._flagged[key] += 1
        spans = self._spans.setdefault(key, [])
        if spans and spans[-1][0] <= start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
        if len(spans) < FINDINGS_MAX and self._flagged[key] < MATCHES_MAX:
            return True
        self._flagged[key] = MATCHES_MAX
        spans.append([start, len(self._original)])
        return False

    def flag_all(self, rule: str, spans: Iterable[tuple[int, int]], severity: Severity) -> None:
        """Note findings at sorted `spans` of `text`, as far as the bound of the rule allows."""
        for start, end in spans:
            if not self.flag(rule, start, end, severity):
                return

    def flag_whole(self, rule: str, severity: Severity) -> None:
        """Note a finding about the whole original text."""
        self._spans[rule, severity] = [[0, len(self._original)]]

    def normalized(self) -> Normalized:
        """Return the text that the steps have made, with all findings."""
        findings = [
            Finding(rule, start, end, severity)
            for (rule, severity), spans in self._spans.items()
            for start, end in spans
        ]
        findings.sort(key=BY_PLACE)
        return Normalized(self.text, tuple(findings), tuple(self._maps))


def _back(maps: Sequence[OffsetMap], start: int, end: int) -> tuple[int, int]:
    """Return the original span of a span behind all `maps`."""
    for step in reversed(maps):
        start, end = step.span_before(start, end)
    return start, end
