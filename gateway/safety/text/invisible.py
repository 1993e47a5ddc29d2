"""Invisible characters: taken out everywhere but in the places where writing systems and emoji need them.

`PLACES` is the whole policy: a character stays if what stands directly before it and after it says so. Everything
else of `CANDIDATES` goes. What a place asks for is always a character that stays, so taking others out does not make
or break places (where it still can, because marks change their order, `normalize` goes over the text again).

What survives: at most one joiner between two letters of a joining script, one variant selector (of 32) after an
ideograph.
"""

import re
from typing import Final, NamedTuple

from gateway.safety.findings import Severity
from gateway.safety.text import characters as c
from gateway.safety.text.offsets import Edit
from gateway.safety.text.trail import Trail

LONG_RUN = 8
"""Invisible characters in a row that are no accident: one severity up."""
_SEEN_MAX = 64
"""Characters of a run that are looked at for its rules."""


class Place(NamedTuple):
    """Where an invisible character is at home."""

    before: str
    """What stands before it: a fixed-width pattern."""
    character: str
    """The inside of a class."""
    after: str
    """What stands after it: a pattern, matched without taking anything."""


_PICTOGRAPH = f"[{c.PICTOGRAPHS}]"
# Symbols that double as letters (circled M, letterlike i) are not part of emoji sequences.
_JOINED = f"(?![\u24c2\u2139\xa9\xae\u2122]){_PICTOGRAPH}"
_JOINING = f"[{c.JOINING}]"
_MORE = f"[{c.JOINERS}]*+"
_WORD_END = r"[\n\r \t!-/:-@\[-`{-~\xa0\u060c\u061b\u061f\u06d4\u0964\u0965\u2026]|\Z"
_MONGOLIAN = f"[{c.MONGOLIAN}]"
_HAN = f"[{c.HAN}]"
_HIEROGLYPH = "[\U00013000-\U00013455]"

PLACES: Final = (
    # Persian, Urdu, Kurdish, Indic: non-joiner between letters; joiner between letters or at the end of a word. Of
    # several (typed twice by mistake) the first stays.
    Place(_JOINING, "\u200c", f"{_MORE}{_JOINING}"),
    Place(_JOINING, "\u200d", f"{_MORE}(?:{_JOINING}|{_WORD_END})"),
    Place(f"{_MONGOLIAN}[\u180b-\u180d\u180f]", "\u200c\u200d", _JOINING),
    # Emoji sequences: woman + joiner + laptop, heart + presentation selector + joiner + fire.
    Place(f"[{c.PICTOGRAPHS}{c.SKIN_TONES}]", "\u200d", _JOINED),
    Place(f"{_PICTOGRAPH}\ufe0f", "\u200d", _JOINED),
    # Khmer, Thai, Lao, Myanmar: word boundaries.
    Place(f"[{c.SEA}]", "\u200b", f"[{c.SEA}]"),
    # Emoji and text presentation; keycaps.
    Place(_PICTOGRAPH, "\ufe0e\ufe0f", ""),
    Place("[#*0-9]", "\ufe0f", "\u20e3"),
    # Standardized variants: zero, mathematics, Myanmar, Phags-pa, Manichaean, chess, punctuation, hieroglyphs.
    Place("[0\u2200-\u22ff\u2a00-\u2aff\u1000-\u109f\uaa60-\uaa7f\ua840-\ua877]", "\ufe00", ""),
    Place("[\U00010ac0-\U00010aff\u2654-\u265f]", "\ufe00", ""),
    Place("[\u3001\u3002]", "\ufe00\ufe01", ""),
    Place(_HIEROGLYPH, "\ufe00-\ufe06", ""),
    # Ideographs: standardized compatibility variants, and variants of the ideographic database.
    Place(_HAN, "\ufe00-\ufe02\U000e0100-\U000e011f", ""),
    # Mongolian: free variants and the vowel separator.
    Place(_MONGOLIAN, "\u180b-\u180d\u180f", ""),
    Place(_MONGOLIAN, "\u180e", _MONGOLIAN),
    Place(f"{_MONGOLIAN}[\u180b-\u180d\u180f]", "\u180e", _MONGOLIAN),
    # Old Hangul syllables without a lead or a vowel; Hebrew marks kept in order; quadrats of hieroglyphs.
    Place("", "\u115f", f"[{c.HANGUL_VOWELS}]"),
    Place(f"[{c.HANGUL_LEADS}]", "\u1160", ""),
    Place("[\u0591-\u05f4]", "\u034f", "[\u0591-\u05f4]"),
    Place(_HIEROGLYPH, c.HIEROGLYPH_CONTROLS, ""),
)

FLAGS: Final = ("gbeng", "gbsct", "gbwls")
"""The flags that are written with tags: England, Scotland, Wales (all that Unicode recommends)."""

_ALWAYS = (
    c.CONTROLS
    + c.SOFT_HYPHEN
    + c.EMBEDDINGS
    + c.OPERATORS
    + c.ZERO_WIDTH
    + c.ANNOTATIONS
    + c.FORMATS
    + c.SELECTORS_FAR
)
_PLACED = (
    c.JOINERS
    + c.SELECTORS
    + c.MONGOLIAN_CONTROLS
    + c.HANGUL_FILLERS
    + c.GRAPHEME_JOINER
    + c.HIEROGLYPH_CONTROLS
)
CANDIDATES: Final = _ALWAYS + _PLACED + c.TAGS + c.BIDI_MARKS + c.ISOLATES

_RULES: Final = (
    ("unicode.control", Severity.LOW, c.CONTROLS),
    ("unicode.soft_hyphen", Severity.LOW, c.SOFT_HYPHEN),
    ("unicode.bidi", Severity.MEDIUM, c.EMBEDDINGS),
    ("unicode.bidi", Severity.LOW, c.BIDI_MARKS + c.ISOLATES),
    ("unicode.invisible_operator", Severity.LOW, c.OPERATORS),
    ("unicode.zero_width", Severity.LOW, c.ZERO_WIDTH + c.JOINERS),
    ("unicode.annotation", Severity.LOW, c.ANNOTATIONS),
    (
        "unicode.format",
        Severity.LOW,
        c.FORMATS + c.MONGOLIAN_CONTROLS + c.GRAPHEME_JOINER + c.HIEROGLYPH_CONTROLS,
    ),
    ("unicode.variation_selector", Severity.LOW, c.SELECTORS + c.SELECTORS_FAR),
    ("unicode.filler", Severity.LOW, c.HANGUL_FILLERS),
    ("unicode.tag", Severity.HIGH, c.TAGS),
)
_RULE_OF: Final = {
    chr(code): (rule, severity) for rule, severity, inside in _RULES for code in c.members(inside)
}


def strip(trail: Trail, *, right_to_left: bool) -> None:
    """Takes invisible characters out that are not at home. ``right_to_left``: whether such letters are in the text."""
    _remove(trail, _STRAY_RTL if right_to_left else _STRAY)


def strip_all(trail: Trail) -> None:
    """Takes every invisible character out, whatever stands beside it."""
    _remove(trail, _ANY)


def _remove(trail: Trail, stray: "re.Pattern[str]") -> None:
    """Takes what ``stray`` matches out, and flags it."""
    before = trail.text
    if stray.search(before) is None:
        return
    _flag(trail, stray)
    trail.advance(
        stray.sub("", before),
        lambda: (Edit(match.start(), match.end(), 0) for match in stray.finditer(before)),
    )


def _flag(trail: Trail, stray: "re.Pattern[str]") -> None:
    """Flags matches until one rule has had enough, and then what is left by its characters."""
    for match in stray.finditer(trail.text):
        start, end = match.span()
        if match[0] == "\ufeff" and start == 0:
            continue  # a byte order mark in its own place
        grade = 1 if end - start >= LONG_RUN else 0
        for rule, severity in {_RULE_OF[character] for character in match[0][:_SEEN_MAX]}:
            if not trail.flag(rule, start, end, Severity(min(severity + grade, Severity.CRITICAL))):
                _flag_rest(trail, start)
                return


def _flag_rest(trail: Trail, start: int) -> None:
    """Flags each rule once more, from its next character to the end of the text."""
    rest = trail.text[start:]
    for character in _RULE_OF.keys() & set(rest):
        rule, severity = _RULE_OF[character]
        trail.flag_rest(rule, start + rest.index(character), severity)


_MERGED = c.merged(_ALWAYS + _PLACED + c.TAGS + c.BIDI_MARKS)


def _not_at_home() -> str:
    """Holds after a placed character that is in none of its `PLACES`: a branch for each set of places."""
    refusals = dict.fromkeys(c.members(_PLACED), "")
    for place in PLACES:
        refusal = f"(?!(?<={place.before}[{place.character}])(?:{place.after}))"
        for code in c.members(place.character):
            refusals[code] += refusal
    branches: dict[str, list[int]] = {}
    for code, refusal in sorted(refusals.items()):
        branches.setdefault(refusal, []).append(code)
    return "|".join(f"(?<=[{c.ranges(codes)}]){refusal}" for refusal, codes in branches.items())


def _not_in_flag() -> str:
    """Holds after a tag that is not part of one of `FLAGS`."""
    refusals = []
    for flag in FLAGS:
        tags = "".join(chr(0xE0000 + ord(letter)) for letter in flag) + "\U000e007f"
        refusals += [f"(?!(?<=\U0001f3f4{tags[:at]}){tags[at:]})" for at in range(1, len(tags) + 1)]
    return "".join(refusals)


def _stray(bidi_marks: str) -> "re.Pattern[str]":
    """One invisible character, or several in a row, where they do not belong."""
    return re.compile(
        f"[{_MERGED}](?:"
        f"(?<=[{_ALWAYS}])[{_ALWAYS}]*+"
        f"|{_not_at_home()}"
        f"|(?<=[{c.TAGS}]){_not_in_flag()}[{c.TAGS}]*+"
        f"|(?<=[{c.BIDI_MARKS}]){bidi_marks})"
    )


_STRAY = _stray("")
# Beside letters that run from right to left, a mark stays unless another invisible character follows it.
_STRAY_RTL = _stray(f"(?=[{c.merged(CANDIDATES)}])")
_ANY = re.compile(f"[{c.merged(CANDIDATES)}]+")
