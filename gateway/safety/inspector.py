"""The seam of prompt safety, and the plain inspector behind it: normal line ends, no control characters."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_LINE_ENDS: Final = re.compile(r"\r\n?")
# C0 controls and DEL, except tab and newline. They are invisible, and some tokenizers and terminals act on them.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Finding:
    """One thing that was found in a text, without the text itself."""

    rule: str
    """Which rule found it, such as "control_characters"."""
    count: int
    """How often."""


@dataclass(frozen=True)
class Inspected:
    """A text as it may go on, and what was found in it."""

    text: str
    findings: Sequence[Finding] = ()


class Inspector(Protocol):
    """Normalizes and inspects one text."""

    def inspect(self, text: str) -> Inspected:
        """``text`` as it may go on. A pure function."""


class ControlInspector:
    """Makes line ends ``\\n`` and takes control characters out."""

    def inspect(self, text: str) -> Inspected:
        """See `Inspector.inspect`."""
        text = _LINE_ENDS.sub("\n", text)
        text, removed = _CONTROLS.subn("", text)
        findings = (Finding("control_characters", removed),) if removed else ()
        return Inspected(text, findings)
