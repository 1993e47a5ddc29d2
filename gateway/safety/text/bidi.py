"""Bidirectional isolates: kept where they pair up on one line of a text with right-to-left letters, else taken out.

Overrides and embeddings always go, and marks (LRM, RLM, ALM) go where no letter runs from right to left: see
`invisible`.
"""

import re
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text import characters as c
from gateway.safety.text.trail import Trail

RULE: Final = "unicode.bidi"
DEPTH_MAX = 8
"""Isolates inside each other. Deeper ones are no text."""

_RIGHT_TO_LEFT = re.compile(f"[{c.RTL}]")
_ISOLATE = re.compile(f"[{c.ISOLATES}]")
_ISOLATES = re.compile(f"[{c.ISOLATES}]+")
_STRUCTURE = re.compile(f"[{c.ISOLATES}\n{c.LINE_ENDS}]")
_CLOSE = "\u2069"


def has_right_to_left(text: str) -> bool:
    """Whether any letter of ``text`` runs from right to left."""
    return _RIGHT_TO_LEFT.search(text) is not None


def remove_stray_isolates(trail: Trail, *, right_to_left: bool) -> None:
    """Takes isolates out that do not pair up; all of them in a text without right-to-left letters."""
    before = trail.text
    if _ISOLATE.search(before) is None:
        return
    if right_to_left:
        spans = [(at, at + 1) for at in _unpaired(before)]
    else:
        spans = [match.span() for match in _ISOLATES.finditer(before)]
    for start, end in spans:
        if not trail.flag(RULE, start, end, Severity.LOW):
            trail.flag_rest(RULE, start, Severity.LOW)
            break
    trail.cut(spans)


def _unpaired(text: str) -> list[int]:
    """Where isolates stand that have no partner on their line, hold nothing or lie too deep."""
    stray: list[int] = []
    opened: list[int] = []
    for match in _STRUCTURE.finditer(text):
        at, character = match.start(), match[0]
        if character == _CLOSE:
            stray += _closed(opened, at)
        elif _ISOLATE.match(character):
            opened.append(at)
        else:
            stray += opened
            opened.clear()
    return sorted(stray + opened)


def _closed(opened: list[int], at: int) -> tuple[int, ...]:
    """Which of a pair that ends ``at`` go: none, or the end, or both."""
    if not opened:
        return (at,)
    start = opened.pop()
    return (start, at) if at == start + 1 or len(opened) >= DEPTH_MAX else ()
