"""Filters what is assembled from an answer: its text without the calls, its reasoning, and values inside calls.

The output filter has decided about the answer as the model wrote it. Assembling joins text around a
call, and turns `4.1e15` or a string that is JSON itself into what the caller reads. So a finding
counts here unless it occurs in the answer as it was written, where the policy let it pass or a
value of the caller's own was restored.
"""

from gateway.safety.findings import Placeholders, apply
from gateway.safety.output.redactor import OutputRules, Redactor


class AssembledFilter:
    """Filters one answer."""

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._placeholders = Placeholders()
        self._written: list[str] = []
        self._known = 0, frozenset[str]()
        """Number of parts that were written, and the values in them that rules would edit."""
        self._text, self._reasoning = (
            Redactor(rules, self._placeholders, self._is_known) for _ in range(2)
        )
        self._blocked: tuple[str, ...] = ()
        self._altered_chars = 0
        """Characters that were written but are not in the text so far: marks, calls, reasoning."""

    @property
    def blocked(self) -> tuple[str, ...]:
        """Rules that ended the answer; what follows must not be shown."""
        return self._text.stopped or self._reasoning.stopped or self._blocked

    def note(self, written: str) -> None:
        """Record the next part of the answer as it was written, before it is assembled."""
        if written:
            self._written.append(written)
            self._altered_chars += len(written)

    def push(self, text: str) -> str:
        """Return what may be shown after `text` was assembled."""
        self._altered_chars -= len(text)
        return self._text.push(text)

    def push_reasoning(self, text: str) -> str:
        """Return what may be shown of the reasoning after `text` was assembled."""
        return self._reasoning.push(text)

    def finish(self) -> tuple[str, str]:
        """Return the rest of the text and of the reasoning."""
        if not self._altered_chars:
            return self._text.finish_unscanned(), ""  # nothing is in it that was not let pass
        return self._text.finish(), self._reasoning.finish()

    def value(self, text: str) -> str:
        """Return what may be shown of a whole value."""
        findings = [
            finding
            for finding in self._rules.scanner.scan(text)
            if not self._is_known(text[finding.start : finding.end])
        ]
        decision = apply(self._rules.table, text, findings, self._placeholders)
        self._blocked = self._blocked or decision.blocked
        return decision.text

    def _is_known(self, value: str) -> bool:
        """Return whether `value` was let pass: it is (part of) a finding in the answer as it was written."""
        size, values = self._known
        # The answer has grown since it was scanned.
        if size != len(self._written):
            written = "".join(self._written)
            self._written = [written]
            findings, edits = self._rules.scanner.scan(written), self._rules.table.edits
            values = frozenset(
                written[finding.start : finding.end] for finding in findings if edits(finding.rule)
            )
            self._known = 1, values
        return any(value in finding for finding in values)
