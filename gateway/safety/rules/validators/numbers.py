"""Validators of numbers with check digits or a strict structure."""

import re
from functools import cache
from importlib.resources import files
from typing import Final

from stdnum import luhn, numdb, verhoeff
from stdnum.de import idnr
from stdnum.exceptions import ValidationError
from stdnum.fr import nir
from stdnum.gb import nhs
from stdnum.iban import is_valid as is_iban
from stdnum.in_ import pan
from stdnum.us import ssn

from gateway.safety.rules.spec import LOOKBEHIND, RuleMatch, Span

_SEPARATORS: Final = str.maketrans("", "", " -./")
_GROUPINGS: Final = frozenset(
    {(4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 4, 4, 1), (4, 4, 4, 4, 2), (4, 4, 4, 4, 3)}
)
_NUMBER_BEFORE: Final = re.compile(r"[0-9][-.,/]\Z")
_NUMBER_BEHIND: Final = re.compile(r"[-.,/]?[0-9]")
_GROUP_BEFORE: Final = re.compile(r"(?<![A-Za-z0-9])(?:[A-Z]{2}[0-9]{2}|[0-9]{4})[ -]\Z")
_GROUP_BEHIND: Final = re.compile(r"[ -][0-9]{4}(?![0-9])")
_CARD_WORDS: Final = re.compile(r"card|visa|kart|carte|tarjeta|amex", re.IGNORECASE)
_REST_BEHIND: Final = re.compile(r" [0-9]{2}(?![0-9]|[/.:,-][0-9])")
_YEARS: Final = re.compile(r"(?:(?:19|20)[0-9]{2})+\Z")
_NINO_NEVER: Final = frozenset({"BG", "GB", "KN", "NK", "NT", "TN", "ZZ"})
_WEIGHTS: Final = (7, 3, 1)
_BBAN_PART: Final = re.compile(r"(\d+)!")


def _issuers() -> dict[str, list[tuple[int, int, frozenset[int]]]]:
    """By first digit: first and last number of a range of leading digits, and lengths."""
    text = files("gateway.safety").joinpath("data/card_issuers.txt").read_text(encoding="utf-8")
    by_digit: dict[str, list[tuple[int, int, frozenset[int]]]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            span, lengths, _ = line.split(maxsplit=2)
            first, _, last = span.partition("-")
            row = int(first), int(last or first), frozenset(map(int, lengths.split(",")))
            by_digit.setdefault(first[0], []).append(row)
    return by_digit


_ISSUERS: Final = _issuers()


def is_issued(number: str) -> bool:
    """Whether a known issuer has numbers that start so and are that long."""
    return number.isdecimal() and any(
        first <= int(number[: len(str(first))]) <= last and len(number) in lengths
        for first, last, lengths in _ISSUERS.get(number[:1], ())
    )


@cache
def iban_length(country: str) -> int:
    """Letters and digits of an IBAN of ``country``, check digits included; 0: the country has none."""
    found = numdb.get("iban").info(country)[0][1]
    return 4 + sum(map(int, _BBAN_PART.findall(found["bban"]))) if found else 0


def digits_of(value: str) -> str:
    """A number without its separators, in upper case."""
    return value.translate(_SEPARATORS).upper()


def _stands_alone(found: RuleMatch) -> bool:
    """It is no part of a longer number, a decimal fraction or a version."""
    return not _NUMBER_BEFORE.search(found.before(2)) and not _NUMBER_BEHIND.match(found.after(2))


def _in_series(found: RuleMatch) -> bool:
    """It is cut out of a longer row of groups of four, such as a table of years."""
    return bool(_GROUP_BEFORE.search(found.before(7)) or _GROUP_BEHIND.match(found.after(6)))


def payment_card(found: RuleMatch) -> Span | None:
    """Luhn, a known issuer with that length, and the groups that are printed on cards.

    Groups of four in a longer row of such groups count only behind a word for cards: one row of a table in forty
    would pass.
    """
    groups = tuple(map(len, re.split("[ -]", found.value)))
    in_series = _in_series(found) and not _CARD_WORDS.search(found.before(LOOKBEHIND))
    if len(groups) > 1 and (groups not in _GROUPINGS or in_series):
        return None
    number = digits_of(found.value)
    if not is_issued(number) or not luhn.is_valid(number) or not _stands_alone(found):
        return None
    return found.span


def iban(found: RuleMatch) -> Span | None:
    """The length of its country, MOD 97 and the country's own structure."""
    length = iban_length(found.value[:2].upper())
    end = _end_of(found.value, length) if length else 0
    if not end or (found.text[found.start + end : found.start + end + 1] or " ").isalnum():
        return None
    if not is_iban(digits_of(found.value[:end])):
        return None
    return found.start, found.start + end


def _end_of(value: str, count: int) -> int:
    """Where ``count`` letters and digits of ``value`` end; 0 when there are fewer."""
    for at, char in enumerate(value):
        count -= char.isalnum()
        if count == 0:
            return at + 1
    return 0


def us_ssn(found: RuleMatch) -> Span | None:
    """Area, group and serial that are given out."""
    number = digits_of(found.value)
    valid = ssn.is_valid(f"{number[:3]}-{number[3:5]}-{number[5:]}") and _stands_alone(found)
    return found.span if valid else None


def uk_nino(found: RuleMatch) -> Span | None:
    """A prefix that is given out. There is no check digit."""
    return None if digits_of(found.value)[:2] in _NINO_NEVER else found.span


def uk_nhs(found: RuleMatch) -> Span | None:
    """MOD 11."""
    return found.span if nhs.is_valid(digits_of(found.value)) and _stands_alone(found) else None


def de_tax_id(found: RuleMatch) -> Span | None:
    """MOD 11, 10 and the rule of repeated digits."""
    return found.span if idnr.is_valid(digits_of(found.value)) and _stands_alone(found) else None


def de_id_card(found: RuleMatch) -> Span | None:
    """The check digit of travel documents (ICAO 9303: weights 7, 3, 1) over the first nine characters."""
    value = found.value.upper()
    return found.span if icao_digit(value[:9]) == int(value[9]) else None


def icao_digit(value: str) -> int:
    """The check digit of ICAO 9303 for ``value``."""
    return sum(int(char, 36) * _WEIGHTS[at % 3] for at, char in enumerate(value)) % 10


def fr_nir(found: RuleMatch) -> Span | None:
    """MOD 97, Corsica included."""
    number = digits_of(found.value)
    return found.span if _is_nir(number) and _stands_alone(found) else None


def _is_nir(number: str) -> bool:
    try:
        return bool(nir.validate(number))
    except (ValidationError, ValueError):
        return False


def in_aadhaar(found: RuleMatch) -> Span | None:
    """Verhoeff; neither a palindrome nor a row of years."""
    number = digits_of(found.value)
    if number == number[::-1] or not verhoeff.is_valid(number) or not _stands_alone(found):
        return None
    if len(number) < len(found.value) and (
        _in_series(found) or _REST_BEHIND.match(found.after(5)) or _YEARS.match(number)
    ):
        return None
    return found.span


def in_pan(found: RuleMatch) -> Span | None:
    """The kind of holder in the fourth letter. There is no public check digit."""
    return found.span if pan.is_valid(found.value.upper()) else None


def alone(found: RuleMatch) -> Span | None:
    """Any number that is no part of a longer one; for shapes without check digits."""
    has_digit = any(char.isdecimal() for char in found.value)
    return found.span if has_digit and _stands_alone(found) else None
