"""Normalization: a prompt as the model shall see it, every change flagged, and the way back to the original offsets.

The steps, in order: escape sequences, line ends and odd characters, isolates, invisible characters, styled letters,
canonical composition with a limit on marks; then a look for homoglyphs, and chat-template syntax. What the steps do
is decided in their modules. Visible text of any script, emoji and code come out as they went in, in NFC.

Text that a step changed goes through once more, since taking a character out can bring others together. Should it
still not rest, nobody wrote it as text: then all invisible characters go. So the outcome is stable: normalizing it
again changes nothing.

Everything is linear in the length of the text. A clean text is the same object before and after.
"""

import re
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text.ansi import remove_escapes
from gateway.safety.text.bidi import has_right_to_left, remove_stray_isolates
from gateway.safety.text.chat_syntax import DEFAULT_SYNTAX, ChatSyntax
from gateway.safety.text.composed import compose
from gateway.safety.text.homoglyphs import flag_homoglyphs
from gateway.safety.text.invisible import strip, strip_all
from gateway.safety.text.plain import replace_odd
from gateway.safety.text.styled import fold_full_width, fold_styled
from gateway.safety.text.trail import Normalized, Trail
from gateway.safety.text.traits import BIDI, FULL_WIDTH, MARK, ODD, STYLED, Traits, traits

RULE_INVISIBLE_ONLY: Final = "unicode.invisible_only"

_ASCII_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


def normalize(text: str, syntax: ChatSyntax = DEFAULT_SYNTAX) -> Normalized:
    """The model's view of ``text``. Never raises: lone surrogates (see `decode`) become U+FFFD.

    The outcome has at most four times as many characters, and is stable.
    """
    trail = Trail(text)
    if not text.isascii() or _ASCII_ODD.search(text):
        _clean(trail)
    syntax.neutralize(trail)
    return trail.normalized()


def decode(data: bytes) -> str:
    """UTF-8, with a lone surrogate for each byte that is none, so that `normalize` can replace and flag it."""
    return data.decode("utf-8", "surrogateescape")


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
