"""Canonical composition (NFC), and a limit on combining marks.

NFC changes how a text is stored and not how it looks, with one exception that is left out: compatibility ideographs,
which it would turn into others. NFKC is not applied as a whole, see `styled`.

Growth: NFC turns one character into at most three (and UTF-8 bytes into at most three times as many), by its
definition.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Final

import numpy as np

from gateway.safety.findings import Severity
from gateway.safety.text import characters as c
from gateway.safety.text import ucd
from gateway.safety.text.trail import OffsetEdit, Trail
from gateway.safety.text.traits import MARK, Traits, traits

MARKS_MAX = 16
"""Combining marks on one character. Tibetan stacks and Hebrew accents need at most nine."""
RULE: Final = "unicode.combining_flood"

_APART = re.compile(f"([{c.COMPATIBILITY_HAN}]+)")


def compose(trail: Trail, *, has_marks: bool) -> None:
    """Brings the text to NFC, with at most `MARKS_MAX` marks on a character. ``has_marks``: whether there are any."""
    if has_marks:
        _limit_marks(trail)
    before = trail.text
    composed = _composed(before)
    if composed != before:
        trail.advance(composed, lambda: _edits(before))
        _limit_marks(trail)


def _composed(text: str) -> str:
    """``text`` in NFC, compatibility ideographs as they are."""
    composed = ucd.normalize("NFC", text)
    if composed == text or _APART.search(text) is None:
        return composed
    parts = _APART.split(text)
    return "".join(part if at % 2 else ucd.normalize("NFC", part) for at, part in enumerate(parts))


def _limit_marks(trail: Trail) -> None:
    """Takes the marks out that are too many for their character."""
    spans = _floods(traits(trail.text))
    if not spans:
        return
    trail.flag_all(RULE, spans, Severity.MEDIUM)
    trail.cut(spans)


def _floods(seen: Traits) -> list[tuple[int, int]]:
    """The stretches of marks past the first `MARKS_MAX` of their character."""
    is_mark = np.concatenate(([False], (seen.kinds & MARK) != 0, [False]))
    edges = np.flatnonzero(is_mark[1:] != is_mark[:-1])
    starts, ends = edges[::2] + MARKS_MAX, edges[1::2]
    too_long = starts < ends
    return list(zip(starts[too_long].tolist(), ends[too_long].tolist(), strict=True))


def _edits(before: str) -> Iterator[OffsetEdit]:
    """What NFC changed: clusters of a character and what can compose with it, and single characters."""
    for match in _clusters().finditer(before):
        composed = ucd.normalize("NFC", match[0])
        if composed != match[0]:
            yield OffsetEdit(match.start(), match.end(), len(composed))


@cache
def _clusters() -> "re.Pattern[str]":
    """Every stretch that NFC could change, by itself and apart from what stands around it."""
    joining = set(c.matching(lambda character: ucd.combining(character) != 0, 0x300))
    singles = []
    for code in c.matching(
        lambda character: ucd.decomposition(character)[:1] not in ("", "<"), 0xC0
    ):
        parts = ucd.decomposition(chr(code)).split()
        if len(parts) == 2 and ucd.normalize("NFC", chr(code)) == chr(code):
            joining.add(int(parts[1], 16))
        elif len(parts) == 1 or ucd.normalize("NFC", chr(code)) != chr(code):
            singles.append(code)
    joining.update(range(0x1161, 0x1176), range(0x11A8, 0x11C3))
    han = set(c.members(c.COMPATIBILITY_HAN))
    inside = c.ranges(sorted(joining))
    return re.compile(
        f"[^{inside}{c.COMPATIBILITY_HAN}]?[{inside}]+|[{c.ranges(sorted(set(singles) - han))}]"
    )
