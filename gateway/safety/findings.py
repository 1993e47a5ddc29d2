"""What a rule of the safety layer found: a name and a place, never the text itself."""

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """How bad it is that a rule matched."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One match of one rule.

    Attributes:
        rule: dotted name, such as "pii.iban" or "secret.aws_access_key".
        start: first character, counted in the text that was inspected.
        end: the character behind the last one.
        severity: how bad it is.
    """

    rule: str
    start: int
    end: int
    severity: Severity
