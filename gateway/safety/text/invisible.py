"""Removes invisible characters, except where writing systems and emoji need them.

A character stays if the characters directly before and after it match one of its `CONTEXTS`, or if
it is a tag in one of the `FLAGS`; bidirectional characters have rules of their own (below). All
others of `characters.INVISIBLE` are removed. A context always requires a character that stays, so
removing others does not make or break contexts (where it still can, because marks change their
order, `normalize` processes the text again). At most one joiner between two letters of a joining
script and one variation selector after an ideograph survive.

Bidirectional isolates stay where they pair up on one line of a text with right-to-left letters.
Overrides and embeddings are always removed, and marks (LRM, RLM, ALM) where no letter runs from
right to left.

`smuggled` reads what invisible characters of the original text spell, for the rules: tags, and
bytes in variation selectors.
"""

import re
from typing import Final, NamedTuple

from gateway.safety.findings import Severity
from gateway.safety.text import characters as c
from gateway.safety.text.edited_text import EditedText

LONG_RUN = 8
"""Invisible characters in a row that are no accident: the severity is one higher."""
_SEEN_MAX = 64
"""Characters of a run that are inspected for its rules."""


class AllowedContext(NamedTuple):
    """A context in which an invisible character is legitimate."""

    before: str
    """Fixed-width pattern of the text before it."""
    character: str
    """Class of the character, the inside of `[...]`."""
    after: str
    """Pattern of the text after it; matched as a look-ahead."""


_PICTOGRAPH = f"[{c.PICTOGRAPHS}]"
# Symbols that double as letters (circled M, letterlike i) are not part of emoji sequences.
_JOINED = f"(?![\u24c2\u2139\xa9\xae\u2122]){_PICTOGRAPH}"
_JOINING = f"[{c.JOINING}]"
_MORE = f"[{c.JOINERS}]*+"
_WORD_END = r"[\n\r \t!-/:-@\[-`{-~\xa0\u060c\u061b\u061f\u06d4\u0964\u0965\u2026]|\Z"
_MONGOLIAN = f"[{c.MONGOLIAN}]"
_HAN = f"[{c.HAN}]"
_HIEROGLYPH = "[\U00013000-\U00013455]"

CONTEXTS: Final = (
    # Persian, Urdu, Kurdish, Indic: non-joiner between letters; joiner between letters or at the end of a word. Of
    # several (typed twice by mistake) the first stays.
    AllowedContext(_JOINING, "\u200c", f"{_MORE}{_JOINING}"),
    AllowedContext(_JOINING, "\u200d", f"{_MORE}(?:{_JOINING}|{_WORD_END})"),
    AllowedContext(f"{_MONGOLIAN}[\u180b-\u180d\u180f]", "\u200c\u200d", _JOINING),
    # Emoji sequences: woman + joiner + laptop, heart + presentation selector + joiner + fire.
    AllowedContext(f"[{c.PICTOGRAPHS}{c.SKIN_TONES}]", "\u200d", _JOINED),
    AllowedContext(f"{_PICTOGRAPH}\ufe0f", "\u200d", _JOINED),
    # Khmer, Thai, Lao, Myanmar: word boundaries.
    AllowedContext(f"[{c.SEA}]", "\u200b", f"[{c.SEA}]"),
    # Emoji and text presentation; keycaps.
    AllowedContext(_PICTOGRAPH, "\ufe0e\ufe0f", ""),
    AllowedContext("[#*0-9]", "\ufe0f", "\u20e3"),
    # Standardized variants: zero, mathematics, Myanmar, Phags-pa, Manichaean, chess, punctuation, hieroglyphs.
    AllowedContext(
        "[0\u2200-\u22ff\u2a00-\u2aff\u1000-\u109f\uaa60-\uaa7f\ua840-\ua877]", "\ufe00", ""
    ),
    AllowedContext("[\U00010ac0-\U00010aff\u2654-\u265f]", "\ufe00", ""),
    AllowedContext("[\u3001\u3002]", "\ufe00\ufe01", ""),
    AllowedContext(_HIEROGLYPH, "\ufe00-\ufe06", ""),
    # Ideographs: standardized compatibility variants, and variants of the ideographic database.
    AllowedContext(_HAN, "\ufe00-\ufe02\U000e0100-\U000e011f", ""),
    # Mongolian: free variants and the vowel separator.
    AllowedContext(_MONGOLIAN, "\u180b-\u180d\u180f", ""),
    AllowedContext(_MONGOLIAN, "\u180e", _MONGOLIAN),
    AllowedContext(f"{_MONGOLIAN}[\u180b-\u180d\u180f]", "\u180e", _MONGOLIAN),
    # Old Hangul syllables without a lead or a vowel; Hebrew marks kept in order; quadrats of hieroglyphs.
    AllowedContext("", "\u115f", f"[{c.HANGUL_VOWELS}]"),
    AllowedContext(f"[{c.HANGUL_LEADS}]", "\u1160", ""),
    AllowedContext("[\u0591-\u05f4]", "\u034f", "[\u0591-\u05f4]"),
    AllowedContext(_HIEROGLYPH, c.HIEROGLYPH_CONTROLS, ""),
)

FLAGS: Final = ("gbeng", "gbsct", "gbwls")
"""Flags that are written with tags: England, Scotland, Wales (all that Unicode recommends)."""

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


def strip(edited: EditedText) -> None:
    """Remove invisible characters outside their `CONTEXTS`, and isolates outside pairs."""
    right_to_left = _RIGHT_TO_LEFT.search(edited.text) is not None
    _remove_stray_isolates(edited, right_to_left=right_to_left)
    _remove(edited, _STRAY_RTL if right_to_left else _STRAY)


def strip_all(edited: EditedText) -> None:
    """Remove every invisible character, whatever stands beside it."""
    _remove(edited, _ANY)


def _remove(edited: EditedText, stray: "re.Pattern[str]") -> None:
    """Remove what `stray` matches, and flag it."""
    if stray.search(edited.text) is not None:
        _flag(edited, stray)
        edited.remove(match.span() for match in stray.finditer(edited.text))


def _flag(edited: EditedText, stray: "re.Pattern[str]") -> None:
    """Flag matches by the rules of their characters; beyond the bound of a rule, the rest as one finding."""
    text = edited.text
    for match in stray.finditer(text):
        start, end = match.span()
        if match[0] == "\ufeff" and start == 0:
            continue  # a byte order mark in its own place
        grade = 1 if end - start >= LONG_RUN else 0
        rules = dict.fromkeys(_RULE_OF[character] for character in match[0][:_SEEN_MAX])
        graded = [(rule, Severity(min(least + grade, Severity.CRITICAL))) for rule, least in rules]
        listed = [edited.flag(rule, start, end, severity) for rule, severity in graded]
        if not all(listed):
            for character in sorted(set("".join(stray.findall(text, end)))):
                rule, severity = _RULE_OF[character]
                edited.flag(rule, text.index(character, end), len(text), severity)
            return


_MERGED = c.merged(c.ALWAYS_INVISIBLE + c.CONTEXTUAL + c.TAGS + c.BIDI_MARKS)


def _out_of_context() -> str:
    """Build a pattern that matches after a character that is in none of its `CONTEXTS`."""
    refusals = dict.fromkeys(c.members(c.CONTEXTUAL), "")
    for context in CONTEXTS:
        refusal = f"(?!(?<={context.before}[{context.character}])(?:{context.after}))"
        for code in c.members(context.character):
            refusals[code] += refusal
    branches: dict[str, list[int]] = {}
    for code, refusal in sorted(refusals.items()):
        branches.setdefault(refusal, []).append(code)
    return "|".join(f"(?<=[{c.ranges(codes)}]){refusal}" for refusal, codes in branches.items())


def _not_in_flag() -> str:
    """Build a pattern that matches after a tag that is not part of one of `FLAGS`."""
    refusals = []
    for flag in FLAGS:
        tags = "".join(chr(0xE0000 + ord(letter)) for letter in flag) + "\U000e007f"
        refusals += [f"(?!(?<=\U0001f3f4{tags[:at]}){tags[at:]})" for at in range(1, len(tags) + 1)]
    return "".join(refusals)


def _stray(bidi_marks: str) -> "re.Pattern[str]":
    """Build the pattern of invisible characters, in a row or alone, where they do not belong."""
    return re.compile(
        f"[{_MERGED}](?:"
        f"(?<=[{c.ALWAYS_INVISIBLE}])[{c.ALWAYS_INVISIBLE}]*+"
        f"|{_out_of_context()}"
        f"|(?<=[{c.TAGS}]){_not_in_flag()}[{c.TAGS}]*+"
        f"|(?<=[{c.BIDI_MARKS}]){bidi_marks})"
    )


_STRAY = _stray("")
# Beside letters that run from right to left, a mark stays unless another invisible character follows it.
_STRAY_RTL = _stray(f"(?=[{c.merged(c.INVISIBLE)}])")
_ANY = re.compile(f"[{c.merged(c.INVISIBLE)}]+")


RULE: Final = "unicode.bidi"
DEPTH_MAX = 8
"""Nesting depth of isolates; deeper ones are no text."""

_RIGHT_TO_LEFT = re.compile(f"[{c.RTL}]")
_ISOLATES = re.compile(f"[{c.ISOLATES}]+")
_STRUCTURE = re.compile(f"[{c.ISOLATES}\n{c.LINE_ENDS}]")
_CLOSE = "\u2069"


def _remove_stray_isolates(edited: EditedText, *, right_to_left: bool) -> None:
    """Remove isolates that do not pair up; all of them in a text without right-to-left letters."""
    if right_to_left:
        spans = [(at, at + 1) for at in _unpaired(edited.text)]
    else:
        spans = [match.span() for match in _ISOLATES.finditer(edited.text)]
    edited.flag_all(RULE, spans, Severity.LOW)
    edited.remove(spans)


def _unpaired(text: str) -> list[int]:
    """Return the offsets of isolates that have no partner on their line, hold nothing or are nested too deep."""
    stray: list[int] = []
    opened: list[int] = []
    for match in _STRUCTURE.finditer(text):
        at, character = match.start(), match[0]
        if character == _CLOSE and opened:
            start = opened.pop()
            # It holds nothing, or nests deeper than any text.
            if at == start + 1 or len(opened) >= DEPTH_MAX:
                stray += start, at
        elif character == _CLOSE:
            stray.append(at)
        elif _ISOLATES.match(character):
            opened.append(at)
        else:
            stray += opened
            opened.clear()
    return sorted(stray + opened)


SELECTORS_MIN = 4
"""Variation selectors in a row that carry bytes and are no accident."""

_TAGS = re.compile("[\U000e0020-\U000e007e]+")
_SELECTORS = re.compile(f"[\ufe00-\ufe0f\U000e0100-{c.SELECTORS_FAR[-1]}]{{{SELECTORS_MIN},}}+")
_TAG_TABLE = {0xE0000 + code: code for code in range(0x20, 0x7F)}


def smuggled(text: str) -> list[tuple[int, int, str]]:
    """Return what invisible characters of `text` spell, by start and end.

    Letters of flags ("gbeng") are included.
    """
    if text.isascii():
        return []
    return sorted(
        (*match.span(), read(match[0]))
        for pattern, read in ((_TAGS, _of_tags), (_SELECTORS, _of_selectors))
        for match in pattern.finditer(text)
    )


def _of_tags(tags: str) -> str:
    return tags.translate(_TAG_TABLE)


def _of_selectors(selectors: str) -> str:
    """Decode the bytes (0 to 255) that variation selectors stand for, as UTF-8."""
    numbers = (code - (0xFE00 if code < 0xFE10 else 0xE00F0) for code in map(ord, selectors))
    return bytes(numbers).decode("utf-8", "replace")
