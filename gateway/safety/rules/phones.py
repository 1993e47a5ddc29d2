"""Validators of telephone numbers, by the numbering plans of the `phonenumbers` library.

A number counts if it is written as only telephone numbers are (a plus, an area code in brackets,
three, three and four digits with hyphens), or if a plan of the rule's regions has it and its groups
or the words before it suggest a telephone number. A word that names another kind of number right
before it suggests the contrary.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Final, NamedTuple

from phonenumbers import (
    NumberParseException,
    PhoneMetadata,
    PhoneNumber,
    is_possible_number,
    is_valid_number,
    parse,
)

from gateway.safety.rules.spec import LOOKBEHIND, RuleMatch, Span

_NO_DIGITS: Final = re.compile(r"[^0-9]+")
_EXTENSION: Final = re.compile(r"\s?(?:x|ext\.?)\s?[0-9]{1,6}\Z", re.IGNORECASE)
_PART_BEFORE: Final = re.compile(r"(?:[0-9+$€£#]|[0-9][-.,/:]|[$€£#] )\Z")
_PART_BEHIND: Final = re.compile(r"[-.,/:]?[0-9]|\s?[%€$£]")
_NORTH_AMERICAN: Final = re.compile(
    r"(?:(?:001|1)[ .-])?(?:\([0-9]{3}\)[ .-]?|[0-9]{3}[.-])[0-9]{3}[.-][0-9]{4}\Z"
)
_BRACKETED: Final = re.compile(r"\(0[0-9]{1,5}\)[ /-]?[0-9]")
_ADDRESS: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}\Z")
_IN_SERIES_BEFORE: Final = re.compile(r"[0-9A-Z]{2}[ -]\Z")
_IN_SERIES_BEHIND: Final = re.compile(r"[ -][0-9]")
_LONG_GROUP: Final = re.compile(r"[0-9]{8}")
_GROUPED: Final = re.compile(r"[0-9][ ()./-]{1,3}[0-9]")
_DATE: Final = re.compile(
    r"(?:[0-3]?[0-9][./-][0-3]?[0-9][./-](?:(?:19|20)[0-9]{2}|[0-9]{2})"
    r"|(?:19|20)[0-9]{2}[./-][01]?[0-9][./-][0-3]?[0-9])(?![./-]?[0-9])"
)
_FILLER: Final = (
    r"(?:[^\w\n]{0,3}(?:number|no|nr|num|is|at|on|me|us|him|her|them|back|to|unter|mich|uns|ist|die|der|au|est|le|al|es|"
    r"el|en|numéro|número|numero|nummer|o|ao|il|é|è|op|på|na|pod)\b)"
)
_NAMED: Final = re.compile(
    r"(?:phone|telefo|téléphone|teléfono|mobile|whatsapp|hotline|helpline|handy|celular|cellulare|telemóvel|durchwahl|"
    r"電話|携帯|電話番号|전화|전화번호|电话|手机|τηλ|τηλέφωνο|फोन|טלפון|هاتف|الهاتف|โทร|(?<![^\W_])(?:"
    r"call|dial|ring|text|reach|contact|cell|tel|tél|fax|sms|mobil|mobiel|móvil|mob|ph|gsm|tlf|portable|anrufen|ruf|"
    r"rufen|joindre|appel|appeler|appelez|llama|llame|chiama|ligue|ligar|bel|puhelin|тел|телефон))[nr]?e?"
    rf"{_FILLER}{{0,4}}[^\w\n]{{0,4}}\Z",
    re.IGNORECASE,
)
"""A word for telephones, and nothing but small words between it and the number."""
_OTHERWISE: Final = re.compile(
    r"(?:order|invoice|ticket|case|ref|reference|id|account|acct|policy|contract|code|pin|zip|tracking|sku|isbn|iban|card|"
    r"version|konto|kontonummer|rechnung|bestellung|auftrag|kunde|kundennummer|commande|facture|pedido|factura|serial|item|part|bank|ssn|"
    r"security|passport|licence|license|member|customer|employee|claim|build|issue|bug|room|parcel|shipment|batch|lot|"
    r"number|no|nr|nummer|vorgang|aktenzeichen|steuer|tax|vat|plz|amount|total|sum|price|eur|usd|gbp)"
    r"(?:[^\w\n]{0,3}(?:number|no|nr|id|is|was|code|nummer|of|:|#))?[^\w\n]{0,4}\Z",
    re.IGNORECASE,
)
"""A word for another kind of number right before this one."""
_PLAIN_DIGITS_MIN: Final = 10
"""Least digits of a number without groups, without a 0 in front, and without a word for telephones
before it.
"""
_NAMED_DIGITS: Final = range(7, 16)
"""Digits of a number behind a word for telephones."""


def phone_international(match: RuleMatch) -> Span | None:
    """Find a number with a country code; leave out groups behind it that do not belong to it."""
    before = match.before(1)
    if (before or " ").isalnum() or before == "+":
        return None
    value = match.value
    extension = _EXTENSION.search(value)
    bare = value[: extension.start()] if extension else value
    for end in _ends(bare):
        if _is_international(bare[:end]):
            whole = extension is not None and end == len(bare)
            return match.start, match.start + (len(value) if whole else end)
    digits = _international_digits(bare)
    if value.startswith("+") and len({*digits[-6:]}) > 1 and _holds(digits, is_possible_number):
        return match.start, match.end
    return None


def _is_international(value: str) -> bool:
    digits = _international_digits(value)
    return 7 <= len(digits) <= 15 and _holds(digits, is_valid_number)


def _international_digits(value: str) -> str:
    digits = _NO_DIGITS.sub("", value.replace("(0)", ""))
    return digits[2:] if digits.startswith("00") else digits


@lru_cache(maxsize=4096)
def _holds(digits: str, check: Callable[[PhoneNumber], bool]) -> bool:
    """Return whether `check` holds for `digits` with the country calling code first."""
    try:
        return check(parse(f"+{digits}"))
    except NumberParseException:
        return False


def phone_national(match: RuleMatch) -> bool:
    """Return whether it is a number as it is dialled in one of the regions in the rule's options."""
    before, regions = match.before(LOOKBEHIND), match.spec.options
    value = _EXTENSION.sub("", match.value)
    digits = _NO_DIGITS.sub("", value)
    if _PART_BEFORE.search(before) or _PART_BEHIND.match(match.after(2)) or len(set(digits)) < 3:
        return False
    # Nothing else is written as three, three and four digits.
    if _NORTH_AMERICAN.match(value):
        return not {"US", "CA"}.isdisjoint(regions) or _is_national(digits, regions)
    # Dates and IP addresses are groups of digits, too.
    if _DATE.match(value) or _ADDRESS.match(value):
        return False
    if _NAMED.search(before):
        return len(digits) in _NAMED_DIGITS and _may_be_national(digits, regions)
    if _OTHERWISE.search(before) or _is_in_series(match):
        return False
    if _BRACKETED.match(value) and 9 <= len(digits) <= 12:
        return _may_be_national(digits, regions)
    grouped, long_group = _GROUPED.search(value), _LONG_GROUP.search(value)
    if grouped and long_group and not value.startswith("0"):
        return False
    # A short plain number is more often an amount or an id.
    if not grouped and digits[0] != "0" and len(digits) < _PLAIN_DIGITS_MIN:
        return False
    return _is_national(digits, regions)


def _is_in_series(match: RuleMatch) -> bool:
    """Return whether it is part of a longer series of groups."""
    before, behind = match.before(3), match.after(2)
    return bool(_IN_SERIES_BEFORE.search(before) or _IN_SERIES_BEHIND.match(behind))


def _ends(value: str) -> Iterator[int]:
    """Yield the whole length, then the ends of groups from the right."""
    yield len(value)
    for at in range(len(value) - 1, 8, -1):
        if value[at - 1].isdecimal() and not value[at].isdecimal():
            yield at


_KINDS: Final = (
    "fixed_line", "mobile", "toll_free", "premium_rate", "shared_cost", "personal_number", "voip", "pager", "uan",
    "voicemail",
)  # fmt: skip
"""Kinds of numbers in a plan."""


class _Plan(NamedTuple):
    """Numbers of a region, the prefix they are dialled with, and their lengths without it.

    Attributes:
        shape: matches those numbers, with the prefix or without.
    """

    shape: re.Pattern[str]
    prefix: str
    lengths: frozenset[int]


@cache
def _plan(region: str) -> _Plan:
    metadata = PhoneMetadata.metadata_for_region(region, None)
    assert metadata is not None, "settings name known regions"
    general = metadata.general_desc
    assert general is not None, "every plan has one"
    prefix, kinds = metadata.national_prefix or "", [getattr(metadata, kind) for kind in _KINDS]
    patterns = [kind.national_number_pattern for kind in kinds if kind is not None]
    numbers = "|".join(filter(None, patterns))
    shape = re.compile(f"(?:{prefix})?(?:{numbers})\\Z")
    return _Plan(shape, prefix, frozenset(general.possible_length))


def load_plans(regions: Iterable[str]) -> None:
    """Read the numbering plans of `regions`, which takes a millisecond each, before a text needs them."""
    for region in regions:
        _plan(region)


def _may_be_national(digits: str, regions: Sequence[str]) -> bool:
    """Return whether a region has numbers of this length, with its prefix or without one."""
    return any(_may_be_of(_plan(region), digits) for region in regions)


def _may_be_of(plan: _Plan, digits: str) -> bool:
    if plan.shape.match(digits):
        return True
    if plan.prefix and digits.startswith(plan.prefix):
        return len(digits) - len(plan.prefix) in plan.lengths
    return digits[0] != "0" and len(digits) in plan.lengths


def _is_national(digits: str, regions: Sequence[str]) -> bool:
    """Return whether a region assigns the number."""
    return any(_plan(region).shape.match(digits) for region in regions)
