"""Findings of the safety layer: rule, span and severity, never the text itself."""

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """Severity of a finding; policies set actions from a severity upwards."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One span of a text that a rule reports."""

    rule: str
    """Which rule, such as "pii.iban", "secret.aws_access_key", "unicode.tag" or "injection.override"."""
    start: int
    """First character, an offset into the text that was inspected."""
    end: int
    """One past the last character."""
    severity: Severity
