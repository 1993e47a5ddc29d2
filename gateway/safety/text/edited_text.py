"""A text between the steps of normalization, with the origins of its characters and the findings."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from gateway.safety.findings import BY_PLACE, Finding, Severity

FINDINGS_MAX: Final = 32
"""Findings that are listed for one rule and severity; one more stands for all that follow."""
MATCHES_MAX: Final = 1024
"""Matches of one rule and severity that are listed; adjacent ones make one finding."""


class EditedText:
    """The text between two steps. Steps read `text`, change it, and `flag` their findings.

    Each character has an origin: the span of the original text that it was made of.

    Attributes:
        text: the text after the last step, for the rules and the tokenizer.
    """

    def __init__(self, original: str) -> None:
        self.text = original
        self._size = len(original)
        self._starts: Sequence[int] = range(self._size + 1)
        """Starts of the origins, and the end of the original text."""
        self._ends: Sequence[int] = range(1, self._size + 1)
        self._flagged: Counter[tuple[str, Severity]] = Counter()
        self._spans: dict[tuple[str, Severity], list[list[int]]] = {}

    @property
    def findings(self) -> Sequence[Finding]:
        """What was changed or noticed, by place in the original text. Bounded (see `FINDINGS_MAX`)."""
        findings = [
            Finding(rule, start, end, severity)
            for (rule, severity), spans in self._spans.items()
            for start, end in spans
        ]
        return sorted(findings, key=BY_PLACE)

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the span of the original text that `text[start:end]` was made of.

        Text that was removed inside the span belongs to it, text that was removed beside it does
        not. An empty span stays empty.
        """
        first = self._starts[start]
        return first, first if end <= start else self._ends[end - 1]

    def advance(self, text: str) -> None:
        """Replace the whole text by one of the same length; each character keeps its origin."""
        self.text = text

    def replace(self, edits: Iterable[tuple[int, int, str]]) -> None:
        """Replace spans of `text`, each given by its start, its end and the new text, in order."""
        parts, position = [], 0
        starts, ends = array("I"), array("I")
        for start, end, new in edits:
            parts += [self.text[position:start], new]
            starts.extend(self._starts[position:start])
            ends.extend(self._ends[position:start])
            starts.extend([self._starts[start]] * len(new))
            ends.extend([self._ends[end - 1]] * len(new))
            position = end
        # Without an edit the origins stay as they are, and cost no memory.
        if position:
            starts.extend(self._starts[position:])
            ends.extend(self._ends[position:])
            self.text = "".join([*parts, self.text[position:]])
            self._starts, self._ends = starts, ends

    def remove(self, spans: Iterable[tuple[int, int]]) -> None:
        """Remove sorted `spans` of `text`."""
        self.replace((start, end, "") for start, end in spans)

    def flag(self, rule: str, start: int, end: int, severity: Severity) -> bool:
        """Note a finding at a span of `text`; spans come in order.

        Returns:
            False once the rule has reached its bound; one more finding then stands for all that
                follow.
        """
        key = rule, severity
        start, end = self.original_span(start, end)
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
        spans.append([start, self._size])
        return False

    def flag_all(self, rule: str, spans: Iterable[tuple[int, int]], severity: Severity) -> None:
        """Note findings at sorted `spans` of `text`, as far as the bound of the rule allows."""
        for start, end in spans:
            if not self.flag(rule, start, end, severity):
                return

    def flag_whole(self, rule: str, severity: Severity) -> None:
        """Note a finding about the whole original text."""
        self._spans[rule, severity] = [[0, self._size]]
