"""Validators of e-mail addresses and telephone numbers.

Whether digits are a telephone number that somebody gives out: what `phonenumbers` says, in a twentieth of its time.

The library's own patterns are compiled once for each region and length. Where its parser would do more than take a
plain national prefix off, the library itself is asked.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import phonenumbers
from phonenumbers import COUNTRY_CODE_TO_REGION_CODE, PhoneMetadata

from gateway.safety.rules.spec import RuleMatch, Span

_CODE_DIGITS_MAX: Final = 3
_NSN_DIGITS: Final = range(2, 18)
_TYPES: Final = (
    "premium_rate", "toll_free", "shared_cost", "voip", "personal_number", "pager", "uan", "voicemail", "fixed_line",
    "mobile",
)  # fmt: skip


@dataclass(frozen=True)
class _Region:
    """One region of the library's metadata.

    Attributes:
        code: its country calling code.
        lengths: of its numbers.
        general: what all its numbers match.
        kinds: by length, what a number of some kind matches.
        leading: how its numbers begin, where a calling code has several regions.
        prefix: what is dialled before a national number.
        plain: the prefix is only taken off.
        abroad: what is dialled before an international number.
    """

    code: str
    lengths: frozenset[int]
    general: re.Pattern[str]
    kinds: Mapping[int, re.Pattern[str]]
    leading: re.Pattern[str] | None
    prefix: re.Pattern[str] | None
    plain: bool
    abroad: re.Pattern[str] | None

    def holds(self, national: str) -> bool:
        """Whether a number of some kind reads ``national``."""
        kind = self.kinds.get(len(national))
        return kind is not None and bool(
            self.general.fullmatch(national) and kind.fullmatch(national)
        )


def is_international(digits: str) -> bool:
    """Whether ``digits``, the country calling code first, are a valid number."""
    for count in range(1, _CODE_DIGITS_MAX + 1):
        code = int(digits[:count])
        if code in COUNTRY_CODE_TO_REGION_CODE:
            answer = None if digits[0] == "0" else _of_code(code, digits[count:], digits)
            return _asked("+" + digits, None) if answer is None else answer
    return _asked("+" + digits, None)


def is_national(digits: str, region: str) -> bool:
    """Whether ``digits``, as dialled inside ``region``, are a valid number."""
    home = _region(region)
    if (
        home is None
        or digits.startswith(home.code)
        or (home.abroad is not None and home.abroad.match(digits))
    ):
        return _asked(digits, region)
    national = _without_prefix(digits, home)
    if national is None or len(national) not in _NSN_DIGITS:
        return _asked(digits, region)
    return _is_given_out(int(home.code), national)


def _of_code(code: int, national: str, digits: str) -> bool | None:
    """None where the library must be asked."""
    main = _region(COUNTRY_CODE_TO_REGION_CODE[code][0])
    if main is None or len(digits) <= 2:
        return None
    stripped = _without_prefix(national, main)
    if stripped is None or len(stripped) not in _NSN_DIGITS:
        return None
    return _is_given_out(code, stripped)


def _without_prefix(digits: str, region: _Region) -> str | None:
    """The national number as the library's parser takes it; None where it would do more."""
    found = region.prefix.match(digits) if region.prefix is not None else None
    if found is None:
        return digits
    if not region.plain:
        return None
    rest = digits[found.end() :]
    if region.general.fullmatch(digits) and not region.general.fullmatch(rest):
        return digits
    return rest if len(rest) in region.lengths else None


def _is_given_out(code: int, national: str) -> bool:
    regions = COUNTRY_CODE_TO_REGION_CODE[code]
    for name in regions:
        region = _region(name)
        if region is None:
            return _asked(f"+{code}{national}", None)
        if len(regions) == 1 or (region.leading is None and region.holds(national)):
            return region.holds(national)
        if region.leading is not None and region.leading.match(national):
            return region.holds(national)
    return False


@cache
def _region(name: str) -> _Region | None:
    metadata: Any = PhoneMetadata.metadata_for_region(name, None)
    if metadata is None or metadata.general_desc is None:
        return None
    prefix = _compiled(metadata.national_prefix_for_parsing)
    return _Region(
        str(metadata.country_code),
        frozenset(metadata.general_desc.possible_length),
        re.compile(metadata.general_desc.national_number_pattern),
        _kinds(metadata),
        _compiled(metadata.leading_digits),
        prefix,
        prefix is None or (prefix.groups == 0 and not metadata.national_prefix_transform_rule),
        _compiled(metadata.international_prefix),
    )


def _kinds(metadata: Any) -> Mapping[int, re.Pattern[str]]:
    patterns: dict[int, list[str]] = {}
    for name in _TYPES:
        kind = getattr(metadata, name)
        if kind is not None and kind.national_number_pattern:
            for length in set(kind.possible_length) & set(metadata.general_desc.possible_length):
                patterns.setdefault(length, []).append(f"(?:{kind.national_number_pattern})")
    return {length: re.compile("|".join(each)) for length, each in patterns.items()}


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    return re.compile(pattern) if pattern else None


def _asked(number: str, region: str | None) -> bool:
    try:
        parsed = phonenumbers.parse(number, region)
    except phonenumbers.NumberParseException:
        return False
    return phonenumbers.is_valid_number(parsed)


_ENDINGS = "png jpg jpeg gif svg webp bmp css js jsx ts tsx json html htm xml txt yaml yml toml lock exe dll"
_FILE_ENDINGS: Final = frozenset(_ENDINGS.split())
_LOCAL_START: Final = "'%+-."
_SEPARATORS: Final = re.compile(r"[^0-9]")
# How national numbers start and how long they can be, for the regions that are on by default.
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
    if not 7 <= len(digits) <= 15 or not _may_be(digits, region):
        return False
    return is_international(digits) if region is None else is_national(digits, region)


def _may_be(digits: str, region: str | None) -> bool:
    """A cheap look before the costly one."""
    shape = _SHAPES.get(region or "")
    return shape is None or shape.match(digits) is not None
