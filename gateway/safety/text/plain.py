"""Characters that another one takes the place of: line ends, blanks, and what is no character at all.

Line ends (CRLF, CR, VT, FF, NEL, LS, PS) become ``\\n`` without a finding. Lone surrogates and noncharacters become
U+FFFD. Hangul fillers with a width, and the braille blank in a text without braille, become a space.
"""

import re
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text import characters as c
from gateway.safety.text.offsets import Edit
from gateway.safety.text.trail import Trail

REPLACEMENT: Final = "\ufffd"

_NOT_PLAIN = re.compile(
    f"[{c.LINE_ENDS}{c.SURROGATES}{c.NONCHARACTERS}{c.BLANKS}{c.BRAILLE_BLANK}]+"
)
_CRLF = re.compile("\r\n")
_BRAILLE = re.compile(f"[{c.BRAILLE}]")
_TABLE: Final = {
    **dict.fromkeys(c.members(c.LINE_ENDS), "\n"),
    **dict.fromkeys(c.members(c.SURROGATES + c.NONCHARACTERS), REPLACEMENT),
    **dict.fromkeys(c.members(c.BLANKS), " "),
}
_TABLE_WITHOUT_BRAILLE: Final = {**_TABLE, ord(c.BRAILLE_BLANK): " "}
_FLAGGED: Final = (
    ("unicode.surrogate", re.compile(f"[{c.SURROGATES}]+")),
    ("unicode.noncharacter", re.compile(f"[{c.NONCHARACTERS}]+")),
    ("unicode.blank", re.compile(f"[{c.BLANKS}]+")),
)
_BRAILLE_BLANKS: Final = ("unicode.blank", re.compile(f"{c.BRAILLE_BLANK}+"))


def replace_odd(trail: Trail) -> None:
    """Puts plain characters in the place of odd ones."""
    before = trail.text
    if _NOT_PLAIN.search(before) is None:
        return
    table = _TABLE
    if not before.isascii():
        has_braille = _BRAILLE.search(before) is not None
        _flag(trail, _FLAGGED if has_braille else (*_FLAGGED, _BRAILLE_BLANKS))
        table = _TABLE if has_braille else _TABLE_WITHOUT_BRAILLE
    if "\r\n" in before:
        trail.advance(
            before.replace("\r\n", "\n"),
            lambda: (Edit(match.start(), match.end(), 1) for match in _CRLF.finditer(before)),
        )
    if _NOT_PLAIN.search(trail.text):
        trail.advance(_NOT_PLAIN.sub(lambda match: match[0].translate(table), trail.text))


def _flag(trail: Trail, rules: tuple[tuple[str, "re.Pattern[str]"], ...]) -> None:
    """Flags what is no line end."""
    for rule, pattern in rules:
        for match in pattern.finditer(trail.text):
            if not trail.flag(rule, match.start(), match.end(), Severity.LOW):
                trail.flag_rest(rule, match.start(), Severity.LOW)
                break
