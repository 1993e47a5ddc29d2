"""What a rule of the safety layer found: which rule, where, how bad. Never the text itself."""

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """How bad a finding is; policies act from a severity on."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One place in a text that a rule has something to say about."""

    rule: str
    """Which rule, such as "pii.iban", "secret.aws_access_key", "unicode.tag" or "injection.override"."""
    start: int
    """First character, an offset into the text that was inspected."""
    end: int
    """One past the last character."""
    severity: Severity
