"""Normalizes prompts: the text for the model, a finding for every change, and a map to the original offsets.

The steps, in order: ANSI escape sequences, line ends and odd characters, isolates, invisible characters, styled
letters, canonical composition with a limit on marks; then homoglyphs and chat-template syntax are looked
for. Visible text of any script, emoji and code come out as they went in, in NFC. The first two steps are here, the
others in modules of their own.

Text that a step changed is processed again, because removing a character can join others. If it still changes in the
second pass, the last pass removes all invisible characters. So the result is stable: normalizing it again
changes nothing.

Everything is linear in the length of the text. A clean text is the same object before and after.

- ANSI escape sequences are removed whole, with parameters and titles. One that never ends loses only its escape
  character (as a control character): what follows stays visible.
- Line ends (CRLF, CR, VT, FF, NEL, LS, PS) become ``\\n`` without a finding. Lone surrogates and noncharacters become
  U+FFFD. Hangul fillers with a width, and the braille blank in a text without braille, become a space.
"""

import re
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text import characters as c
from gateway.safety.text.chat_syntax import DEFAULT_SYNTAX, ChatSyntax
from gateway.safety.text.composed import compose
from gateway.safety.text.homoglyphs import flag_homoglyphs
from gateway.safety.text.invisible import has_right_to_left, remove_stray_isolates, strip, strip_all
from gateway.safety.text.styled import fold_full_width, fold_styled
from gateway.safety.text.trail import Normalized, OffsetEdit, Trail
from gateway.safety.text.traits import BIDI, FULL_WIDTH, MARK, ODD, STYLED, Traits, traits

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
    trail.flag_all(RULE, (match.span() for match in _SEQUENCE.finditer(before)), Severity.MEDIUM)
    trail.advance(
        _SEQUENCE.sub("", before),
        lambda: (OffsetEdit(match.start(), match.end(), 0) for match in _SEQUENCE.finditer(before)),
    )


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
            lambda: (OffsetEdit(match.start(), match.end(), 1) for match in _CRLF.finditer(before)),
        )
    if _NOT_PLAIN.search(trail.text):
        trail.advance(_NOT_PLAIN.sub(lambda match: match[0].translate(table), trail.text))


def _flag(trail: Trail, rules: tuple[tuple[str, "re.Pattern[str]"], ...]) -> None:
    """Flags what is no line end."""
    for rule, pattern in rules:
        spans = (match.span() for match in pattern.finditer(trail.text))
        trail.flag_all(rule, spans, Severity.LOW)


RULE_INVISIBLE_ONLY: Final = "unicode.invisible_only"

_ASCII_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


def normalize(text: str, syntax: ChatSyntax = DEFAULT_SYNTAX) -> Normalized:
    """The model's view of ``text``. Never raises: lone surrogates become U+FFFD.

    The outcome has at most four times as many characters, and is stable.
    """
    trail = Trail(text)
    if not text.isascii() or _ASCII_ODD.search(text):
        _clean(trail)
    syntax.neutralize(trail)
    return trail.normalized()


def _clean(trail: Trail) -> None:
    """All steps that look at single characters, until nothing changes."""
    original = trail.text
    remove_escapes(trail)
    for is_last in (False, False, True):
        before = trail.text
        if before.isascii():
            _ascii_pass(trail)
            break
        seen = traits(before)
        _pass(trail, seen, strict=is_last)
        if trail.text == before:
            flag_homoglyphs(trail, seen)
            break
    else:
        flag_homoglyphs(trail, traits(trail.text))
    if original and not original.isspace() and (not trail.text or trail.text.isspace()):
        trail.flag_whole(RULE_INVISIBLE_ONLY, Severity.HIGH)


def _ascii_pass(trail: Trail) -> None:
    """Line ends and controls: all that ASCII can have."""
    replace_odd(trail)
    if _ASCII_ODD.search(trail.text):
        strip_all(trail)


def _pass(trail: Trail, seen: Traits, *, strict: bool) -> None:
    """One time through the steps that ``seen`` asks for. ``strict``: without any invisible character."""
    if seen.union & ODD:
        replace_odd(trail)
        if strict:
            strip_all(trail)
        else:
            _strip(trail, may_run_both_ways=bool(seen.union & BIDI))
    if seen.union & FULL_WIDTH:
        fold_full_width(trail)
    if seen.union & STYLED:
        fold_styled(trail)
    compose(trail, has_marks=bool(seen.union & MARK))


def _strip(trail: Trail, *, may_run_both_ways: bool) -> None:
    """Takes stray isolates and stray invisible characters out."""
    right_to_left = may_run_both_ways and has_right_to_left(trail.text)
    if may_run_both_ways:
        remove_stray_isolates(trail, right_to_left=right_to_left)
    strip(trail, right_to_left=right_to_left)
