"""Whether digits are a telephone number that somebody gives out: what `phonenumbers` says, in a twentieth of its time.

The library's own patterns are compiled once for each region and length. Where its parser would do more than take a
plain national prefix off, the library itself is asked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import phonenumbers
from phonenumbers import COUNTRY_CODE_TO_REGION_CODE, PhoneMetadata

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
