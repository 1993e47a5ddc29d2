"""Folds styled letters (full-width, mathematical, circled, squared, raised) to ASCII where they spell words.

NFKC would fold all compatibility characters, and with them much that people mean: superscripts, fractions,
ligatures, the full-width punctuation of Chinese and Japanese. So only letters that stand for ASCII are folded, one
for one, and only where they are no notation:

- full-width characters in a text without any CJK character;
- runs of other styled letters: `RUN_MIN` in a row, or `SPREAD_MIN` with single separators between.

A single mathematical letter, a raised ordinal or full-width Latin in Japanese stays. `skeleton` folds those too, for
the rules.
"""

import re
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text import characters as c
from gateway.safety.text import ucd
from gateway.safety.text.trail import Trail

RUN_MIN = 4
"""Styled letters in a row that spell a word and are no product of variables."""
SPREAD_MIN = 6
"""Styled letters with single separators between that spell words."""
RULE: Final = "unicode.styled"
RULE_FULL_WIDTH: Final = "unicode.full_width"


def _stands_for(character: str) -> str | None:
    """The one ASCII letter or digit that a styled character stands for. Raised and circled digits are notation."""
    style = ucd.decomposition(character).partition(" ")[0]
    if style not in _STYLES:
        return None
    plain = ucd.normalize("NFKC", character)
    is_letter = len(plain) == 1 and plain.isascii() and plain.isalpha()
    is_digit = style == "<font>" and len(plain) == 1 and plain.isascii() and plain.isdigit()
    return plain if is_letter or is_digit else None


_STYLES = {"<font>", "<circle>", "<square>", "<super>", "<sub>"}
_FULL_WIDTH_TABLE: Final = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_STYLED_TABLE: Final = {
    code: plain
    for code in (
        *range(0xAA, 0x3400),
        *range(0xA700, 0xAC00),
        *range(0x10780, 0x107C0),
        *range(0x1D400, 0x1F200),
    )
    if (plain := _stands_for(chr(code)))
}
PLAIN_OF: Final = _FULL_WIDTH_TABLE | _STYLED_TABLE
"""Each styled character by code point, and the ASCII character it stands for."""

STYLED: Final = c.ranges(sorted(_STYLED_TABLE))
"""The class of styled letters other than full-width ones."""
_STYLED = f"[{STYLED}]"
_SEPARATOR = "[ '’,.!?_-]"
_STYLED_FIRST = re.compile(_STYLED)
# Four letters or more, or no match is made at all: formulas have many single letters.
_STYLED_WORDS = re.compile(
    f"{_STYLED}(?=(?:{_SEPARATOR}?{_STYLED}){{3}}){_STYLED}*+(?:{_SEPARATOR}{_STYLED}++)*+"
)
_STYLED_WORD = re.compile(f"{_STYLED}{{{RUN_MIN}}}")
_FULL_WIDTH = re.compile("[\uff01-\uff5e]+")
_CJK = re.compile(f"[{c.CJK}]")
_WIDE = "[\uff21-\uff3a\uff41-\uff5a]"
_WIDE_SPACE = "[ \u3000\uff3f]"
_FULL_WIDTH_SENTENCE = re.compile(
    f"{_WIDE}(?<!{_WIDE}{_WIDE}){_WIDE}*+{_WIDE_SPACE}++(?:{_WIDE}++{_WIDE_SPACE}++)++{_WIDE}*+"
)


def fold_full_width(trail: Trail) -> None:
    """Folds full-width characters outside CJK text; in such text only sentences are flagged."""
    in_cjk = _CJK.search(trail.text) is not None
    flagged = (_FULL_WIDTH_SENTENCE if in_cjk else _FULL_WIDTH).finditer(trail.text)
    trail.flag_all(RULE_FULL_WIDTH, (match.span() for match in flagged), Severity.LOW)
    if not in_cjk:
        trail.advance(
            _FULL_WIDTH.sub(lambda match: match[0].translate(_FULL_WIDTH_TABLE), trail.text)
        )


def fold_styled(trail: Trail) -> None:
    """Folds words of other styled letters."""
    flagging = True

    def folded(match: "re.Match[str]") -> str:
        nonlocal flagging
        words = match[0]
        if _STYLED_WORD.search(words) is None and len(_STYLED_FIRST.findall(words)) < SPREAD_MIN:
            return words
        if flagging:
            flagging = trail.flag(RULE, match.start(), match.end(), Severity.LOW)
            if not flagging:
                trail.flag_rest(RULE, match.start(), Severity.LOW)
        return words.translate(_STYLED_TABLE)

    trail.advance(_STYLED_WORDS.sub(folded, trail.text))
