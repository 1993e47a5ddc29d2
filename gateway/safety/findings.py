"""Findings of inspection: rule, span and severity, never the text itself."""

import enum
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final


class Severity(enum.IntEnum):
    """Severity of a finding; policies set actions from a severity upwards."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """A span of a text that a rule reports."""

    rule: str
    """Name of the rule, such as "pii.iban", "secret.aws_access_key", "unicode.tag" or
    "injection.override".
    """
    start: int
    """Offset of the first character in the inspected text."""
    end: int
    """Offset behind the last character."""
    severity: Severity

    @property
    def span(self) -> tuple[int, int]:
        """Place of the finding: start and end."""
        return self.start, self.end

    def moved(self, by: int) -> "Finding":
        """Return the same finding, `by` characters further on."""
        return replace(self, start=self.start + by, end=self.end + by)


BY_PLACE: Final = attrgetter("start", "end", "rule")
"""Sort key of findings, indicators and taken actions: by place, then by rule."""
