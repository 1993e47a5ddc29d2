"""Classes of characters that safety tells apart, each the inside of a regular expression's `[...]`.

Marks and styled letters come from the tables of `ucd`. Extended_Pictographic is emoji-data.txt of
Unicode 17.0 (Unicode License v3). Blocks stand for scripts.
"""

from collections.abc import Iterable
from typing import Final

from gateway.safety.text import ucd


def ranges(codes: Iterable[int]) -> str:
    """Return a character class of sorted `codes`."""
    spans: list[list[int]] = []
    for code in codes:
        if spans and spans[-1][1] == code - 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in spans)


def merged(characters: str) -> str:
    """Return the same class with as few ranges as possible: beyond the first plane each range costs time."""
    return ranges(sorted(set(members(characters))))


def members(characters: str) -> list[int]:
    """Return the code points of a character class written with plain characters and hyphens."""
    codes: list[int] = []
    at = 0
    while at < len(characters):
        first = ord(characters[at])
        is_range = characters[at + 1 : at + 2] == "-"
        last = ord(characters[at + 2]) if is_range else first
        codes.extend(range(first, last + 1))
        at += 3 if is_range else 1
    return codes


# Invisible, wherever they stand; only isolates in pairs and tags of flags stay. Line ends (CR, VT, FF, NEL, LS, PS) are
# not here: they become newlines.
CONTROLS: Final = "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f"
SOFT_HYPHEN: Final = "\xad"
EMBEDDINGS: Final = "\u202a-\u202e"
"""LRE, RLE, PDF, LRO, RLO, which isolates have replaced (TR9)."""
ISOLATES: Final = "\u2066-\u2069"
OPERATORS: Final = "\u2061-\u2064"
ZERO_WIDTH: Final = "\u2060\ufeff"
ANNOTATIONS: Final = "\ufff9-\ufffb"
FORMATS: Final = (
    "\u17b4\u17b5\u2065\u206a-\u206f\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
)
"""Deprecated format characters, Khmer inherent vowels, format characters of shorthand and musical notation."""
TAGS: Final = "\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
"""Tags, and the rest of their plane that is reserved for invisible characters."""
SELECTORS_FAR: Final = "\U000e0120-\U000e01ef"
"""Variation selectors past the 32 that registered ideographic variants need."""

# Invisible, and legitimate in some contexts (see `invisible.CONTEXTS`).
JOINERS: Final = "\u200b-\u200d"
BIDI_MARKS: Final = "\u061c\u200e\u200f"
SELECTORS: Final = "\ufe00-\ufe0f\U000e0100-\U000e011f"
MONGOLIAN_CONTROLS: Final = "\u180b-\u180f"
HANGUL_FILLERS: Final = "\u115f\u1160"
GRAPHEME_JOINER: Final = "\u034f"
HIEROGLYPH_CONTROLS: Final = "\U00013430-\U00013440"

# Blank with a width: they become a space.
BLANKS: Final = "\u3164\uffa0"
BRAILLE_BLANK: Final = "\u2800"
BRAILLE: Final = "\u2801-\u28ff"

SURROGATES: Final = "\ud800-\udfff"
NONCHARACTERS: Final = "\ufdd0-\ufdef\ufffe\uffff"
"""Those of the first plane; the others are left as any unassigned character is."""
LINE_ENDS: Final = "\r\x0b\x0c\x85\u2028\u2029"

PICTOGRAPHS: Final = (
    "\xa9\xae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u23cf\u23e9-\u23f3\u23f8-\u23fa\u24c2"
    "\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2604\u260e\u2611\u2614\u2615\u2618\u261d\u2620\u2622\u2623\u2626"
    "\u262a\u262e\u262f\u2638-\u263a\u2640\u2642\u2648-\u2653\u265f\u2660\u2663\u2665\u2666\u2668\u267b\u267e\u267f"
    "\u2692-\u2697\u2699\u269b\u269c\u26a0\u26a1\u26a7\u26aa\u26ab\u26b0\u26b1\u26bd\u26be\u26c4\u26c5\u26c8\u26ce"
    "\u26cf\u26d1\u26d3\u26d4\u26e9\u26ea\u26f0-\u26f5\u26f7-\u26fa\u26fd\u2702\u2705\u2708-\u270d\u270f\u2712\u2714"
    "\u2716\u271d\u2721\u2728\u2733\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763\u2764\u2795-\u2797\u27a1"
    "\u27b0\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299"
    "\U0001f000-\U0001f0ff\U0001f170\U0001f171\U0001f17e\U0001f17f\U0001f18e\U0001f191-\U0001f19a\U0001f201-\U0001f20f"
    "\U0001f21a\U0001f22f\U0001f232-\U0001f23a\U0001f250-\U0001f3fa\U0001f400-\U0001faff"
)
"""Extended_Pictographic, with the few other symbols of the emoji blocks."""
SKIN_TONES: Final = "\U0001f3fb-\U0001f3ff"

HAN: Final = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd"
COMPATIBILITY_HAN: Final = "\uf900-\ufaff\U0002f800-\U0002fa1f"
"""Ideographs that NFC would turn into others, which may look different (names are written with them)."""
HANGUL_LEADS: Final = "\u1100-\u115e\ua960-\ua97c"
HANGUL_VOWELS: Final = "\u1161-\u11a7\ud7b0-\ud7c6"
CJK: Final = (
    "\u1100-\u11ff\u2e80-\u2fdf\u3001-\u33ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97c\uac00-\ud7fb\uf900-\ufaff"
    "\ufe30-\ufe4f\uff61-\uffdc\U0001aff0-\U0001b16f\U00020000-\U0003fffd"
)
"""Scripts that full-width letters and punctuation belong to, and their own punctuation."""
DASHES: Final = "\u2010-\u2015\u2212\ufe58\uff0d"
"""Dashes and minus signs that rules read as a hyphen."""
UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, kana and Han, written without spaces."""
MONGOLIAN: Final = "\u1820-\u1878\u1880-\u18aa"
SEA: Final = (
    "\u0e01-\u0edf\u0f00-\u109f\u1780-\u17b3\u17b6-\u17ff\u1950-\u1aad\u1b00-\u1bff\ua980-\uaadf"
)
"""Scripts of South-East Asia, written without spaces: zero-width spaces mark their words."""
JOINING: Final = (
    "\u0610-\u061a\u0620-\u06ff\u070f-\u08ff\u0900-\u0fff\u1000-\u109f\u1700-\u17b3\u17b6-\u17ff\u1807\u180a"
    "\u1820-\u18aa\u1900-\u1aad\u1b00-\u1c4f\u1cd0-\u1cff\ua800-\ua82c\ua840-\ua877\ua880-\ua8ff\ua900-\uaaff\uabc0-\uabf9"
    "\ufb50-\ufdcf\ufdf0-\ufdff\ufe70-\ufefc"
    "\U00010a00-\U00010aff\U00010b80-\U00010baf\U00010d00-\U00010d3f\U00010f30-\U00010fdf\U00011000-\U00011fff"
    "\U0001e900-\U0001e95f"
)
"""Scripts whose letters change their shape with their neighbours, so that joiners show."""
RTL: Final = (
    "\u05be-\u05f4\u0608\u060b\u060d\u061b\u061d-\u064a\u066d-\u06d5\u06e5\u06e6\u06ee-\u088f\u08a0-\u08c9"
    "\ufb1d-\ufdcf\ufdf0-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff"
)
"""Letters of scripts that run from right to left."""


ALWAYS_INVISIBLE: Final = (
    CONTROLS
    + SOFT_HYPHEN
    + EMBEDDINGS
    + OPERATORS
    + ZERO_WIDTH
    + ANNOTATIONS
    + FORMATS
    + SELECTORS_FAR
)
CONTEXTUAL: Final = (
    JOINERS
    + SELECTORS
    + MONGOLIAN_CONTROLS
    + HANGUL_FILLERS
    + GRAPHEME_JOINER
    + HIEROGLYPH_CONTROLS
)
"""Invisible characters that stay in some contexts (see `invisible.CONTEXTS`)."""
INVISIBLE: Final = ALWAYS_INVISIBLE + CONTEXTUAL + TAGS + BIDI_MARKS + ISOLATES


_FULL_WIDTH_TABLE: Final = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_STYLED_TABLE: Final = ucd.by_character("styled")
PLAIN_OF: Final = _FULL_WIDTH_TABLE | _STYLED_TABLE
"""ASCII character of each styled character, by code point."""

STYLED: Final = ranges(sorted(_STYLED_TABLE))
"""Class of styled letters other than full-width ones."""

MARKS: Final[str] = ucd.TABLES["marks"]
"""Class of combining marks, as far as they can flood."""
_ODD: Final = INVISIBLE + LINE_ENDS + SURROGATES + NONCHARACTERS + BLANKS + BRAILLE_BLANK
CHANGEABLE: Final = frozenset(map(chr, [*members(_ODD + MARKS), *PLAIN_OF]))
"""Characters that normalization may change, other than by composition or for chat-template syntax."""
