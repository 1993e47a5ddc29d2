"""ANSI escape sequences: taken out whole, with the parameters and titles that a terminal would not show either.

A sequence that never ends loses only its escape character (as a control character, later): what follows stays
visible.
"""

import re
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text.offsets import Edit
from gateway.safety.text.trail import Trail

RULE: Final = "unicode.ansi"

_STARTS = re.compile("[\x1b\x90\x98\x9b\x9d-\x9f]")
# Strings (OSC, DCS, SOS, PM, APC) run to BEL or ST. None holds the start of another, so no text is read twice.
_STRING_BODY = "[^\x07\x1b\x80-\x9f]*+(?:\x07|\x9c|\x1b\\\\)"
_SEQUENCE = re.compile(
    "\x1b(?:"
    r"\[[0-?]*+[ -/]*+[@-~]"  # CSI: colours, cursor
    rf"|[\]PX^_]{_STRING_BODY}"
    r"|[ -/]{1,4}[0-~]"  # character sets
    r"|[0-?@-OQ-WYZ`-~])"  # single functions: reset, save, index
    # The 8-bit forms are letters in Windows encodings that somebody misread: only what is surely a sequence.
    r"|\x9b[0-?]++[ -/]*+[@-~]"
    rf"|[\x90\x98\x9d-\x9f]{_STRING_BODY}"
)


def remove_escapes(trail: Trail) -> None:
    """Takes ANSI escape sequences out, 7-bit and 8-bit."""
    before = trail.text
    if _STARTS.search(before) is None:
        return
    for match in _SEQUENCE.finditer(before):
        if not trail.flag(RULE, match.start(), match.end(), Severity.MEDIUM):
            trail.flag_rest(RULE, match.start(), Severity.MEDIUM)
            break
    trail.advance(
        _SEQUENCE.sub("", before),
        lambda: (Edit(match.start(), match.end(), 0) for match in _SEQUENCE.finditer(before)),
    )
