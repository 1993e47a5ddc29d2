"""Validators of e-mail addresses and telephone numbers."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from phonenumbers import NumberParseException, is_valid_number, parse

from gateway.safety.rules.spec import RuleMatch, Span

_ENDINGS = "png jpg jpeg gif svg webp bmp css js jsx ts tsx json html htm xml txt yaml yml toml lock exe dll"
_FILE_ENDINGS: Final = frozenset(_ENDINGS.split())
_LOCAL_START: Final = "'%+-."
_SEPARATORS: Final = re.compile(r"[^0-9]")
# How national numbers start and how long they can be: a look at the library costs 50 microseconds.
_SHAPES: Final = {
    region: re.compile(shape)
    for region, shape in {
        "US": r"1?[2-9][0-9]{9}\Z",
        "CA": r"1?[2-9][0-9]{9}\Z",
        "GB": r"0[0-9]{9,10}\Z",
        "DE": r"0[0-9]{5,14}\Z",
        "FR": r"0[0-9]{9}\Z",
        "ES": r"[5-9][0-9]{8}\Z",
        "IN": r"0?[1-9][0-9]{9}\Z",
    }.items()
}


def email(found: RuleMatch) -> Span | None:
    """Labels of a legal length, and no name of a file such as ``logo@2x.png`` or an ssh remote."""
    value = found.value.lstrip(_LOCAL_START)
    start = found.end - len(value)
    local, _, domain = value.partition("@")
    labels = domain.split(".")
    if not local or ".." in local or local.endswith(".") or labels[-1].lower() in _FILE_ENDINGS:
        return None
    if any(not label or len(label) > 63 or label[0] == "-" or label[-1] == "-" for label in labels):
        return None
    if local == "git" and re.match(r":[\w~/]", found.after(2)):
        return None
    return start, found.end


def phone_international(found: RuleMatch) -> Span | None:
    """A number that its country code gives out; groups behind it that do not belong to it are left out."""
    if (found.before(1) or " ").isalnum() or found.before(1) == "+":
        return None
    for end in _ends(found.value):
        if _is_valid(found.value[:end], None):
            return found.start, found.start + end
    return None


def phone_national(found: RuleMatch) -> Span | None:
    """A number that one of the regions in the rule's options gives out."""
    if re.search(r"(?:[0-9][-.,/]?|\+)\Z", found.before(2)) or re.match(
        r"[-.,/]?[0-9]", found.after(2)
    ):
        return None
    if any(_is_valid(found.value, region) for region in found.spec.options):
        return found.span
    return None


def _ends(value: str) -> Iterator[int]:
    """The whole length, then the ends of groups from the right."""
    yield len(value)
    for at in range(len(value) - 1, 8, -1):
        if value[at - 1].isdecimal() and not value[at].isdecimal():
            yield at


def _is_valid(value: str, region: str | None) -> bool:
    digits = _SEPARATORS.sub("", value)
    if region is None and digits.startswith("00"):
        digits = digits[2:]
    shape = _SHAPES.get(region or "")
    if not 7 <= len(digits) <= 15 or (shape is not None and not shape.match(digits)):
        return False
    return is_given_out(digits, region)


@lru_cache(maxsize=4096)
def is_given_out(digits: str, region: str | None) -> bool:
    """Whether ``digits`` are a valid number: as dialled in ``region``, or with the country calling code first."""
    try:
        return is_valid_number(parse(digits if region else f"+{digits}", region))
    except NumberParseException:
        return False
