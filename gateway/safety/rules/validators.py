"""Validators: functions that decide whether a match is a finding. Rules refer to them by name.

Most return whether the whole match is one; the others return which span of the match, or of the
text near it, is one.
"""

import base64
import binascii
import ipaddress
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Final

from stdnum import bitcoin, luhn, numdb
from stdnum.de import idnr
from stdnum.fr import nir
from stdnum.gb import nhs
from stdnum.iban import is_valid as is_iban
from stdnum.in_ import aadhaar, pan
from stdnum.us import ssn

from gateway.safety.rules.phones import phone_international, phone_national
from gateway.safety.rules.spec import LOOKBEHIND, RuleMatch, Span, Validator

# Numbers with check digits or a strict structure.

_SEPARATORS: Final = str.maketrans("", "", " -./")
_GROUPINGS: Final = frozenset(
    {"4444", "465", "464", "44441", "44442", "44443", "4443", "4442", "4441", "444", "4333"}
)
"""Groups of digits as they are printed on cards, by their lengths."""
_NUMBER_BEFORE: Final = re.compile(r"[0-9][-.,/]\Z")
_NUMBER_BEHIND: Final = re.compile(r"[-.,/]?[0-9]")
_GROUP_BEFORE: Final = re.compile(r"(?<![A-Za-z0-9])(?:[A-Z]{2}[0-9]{2}|[0-9]{4})[ -]\Z")
_GROUP_BEHIND: Final = re.compile(r"[ -][0-9]{4}(?![0-9])")
_OF_CSV: Final = re.compile(r"(?<![0-9])[0-9]{2,},\Z")
_CARD_WORDS: Final = re.compile(r"card|visa|kart|carte|tarjeta|amex", re.IGNORECASE)
_REST_BEHIND: Final = re.compile(r" [0-9]{2}(?![0-9]|[/.:,-][0-9])")
_YEARS: Final = re.compile(r"(?:(?:19|20)[0-9]{2})+\Z")
_NINO_NEVER: Final = frozenset({"BG", "GB", "KN", "NK", "NT", "TN", "ZZ"})
_WEIGHTS: Final = (7, 3, 1)
_BBAN_PART: Final = re.compile(r"(\d+)!")


_ISSUERS: Final = json.loads(
    files("gateway.safety").joinpath("data/card_issuers.json").read_text(encoding="utf-8")
)["ranges"]


def is_issued(number: str) -> bool:
    """Return whether a known issuer has numbers that start so and are that long."""
    return any(
        first <= number[: len(first)] <= last and len(number) in lengths
        for first, last, lengths, _ in _ISSUERS
    )


@cache
def iban_length(country: str) -> int:
    """Return the length of an IBAN of `country`, check digits included; 0 if the country has none."""
    structure = numdb.get("iban").info(country)[0][1]
    return 4 + sum(map(int, _BBAN_PART.findall(structure["bban"]))) if structure else 0


def digits_of(value: str) -> str:
    """Return a number without its separators, in upper case."""
    return value.translate(_SEPARATORS).upper()


def _stands_alone(match: RuleMatch) -> bool:
    """Return whether it is no part of a longer number, a decimal fraction or a version."""
    return not _NUMBER_BEFORE.search(match.before(2)) and not _NUMBER_BEHIND.match(match.after(2))


def _in_series(match: RuleMatch) -> bool:
    """Return whether it is cut out of a longer row of groups of four, such as a table of years."""
    return bool(_GROUP_BEFORE.search(match.before(7)) or _GROUP_BEHIND.match(match.after(6)))


def payment_card(match: RuleMatch) -> bool:
    """Check Luhn, a known issuer with that length, and the groups that are printed on cards.

    Groups of four in a longer row of such groups count only behind a word for cards: one row of a
    table in forty would pass.
    """
    groups = [len(group) for group in re.split("[ -]", match.value)]
    in_series = _in_series(match) and not _CARD_WORDS.search(match.before(LOOKBEHIND))
    if len(groups) > 1 and ("".join(map(str, groups)) not in _GROUPINGS or in_series):
        return False
    number = digits_of(match.value)
    if not is_issued(number) or not luhn.is_valid(number):
        return False
    if len(groups) == 3 and len(number) == 12 and not _CARD_WORDS.search(match.before(LOOKBEHIND)):
        return False
    return _stands_alone(match) or _in_columns(match)


def _in_columns(match: RuleMatch) -> bool:
    """Return whether it is a column of comma-separated values: between other numbers, and no fraction of one."""
    before, behind = match.before(4), match.after(2)
    left = not _NUMBER_BEFORE.search(before) or _OF_CSV.search(before)
    right = not _NUMBER_BEHIND.match(behind) or behind[:1] == ","
    return bool(left and right)


def iban(match: RuleMatch) -> Span | None:
    """Check the length of its country, MOD 97 and the country's own structure."""
    length = iban_length(match.value[:2].upper())
    end = _end_of(match.value, length) if length else 0
    if not end or (match.text[match.start + end : match.start + end + 1] or " ").isalnum():
        return None
    if not is_iban(digits_of(match.value[:end])):
        return None
    return match.start, match.start + end


def _end_of(value: str, count: int) -> int:
    """Return where `count` letters and digits of `value` end; 0 if there are fewer."""
    for at, char in enumerate(value):
        count -= char.isalnum()
        if count == 0:
            return at + 1
    return 0


def uk_nino(match: RuleMatch) -> bool:
    """Check that the prefix is assigned. There is no check digit."""
    return digits_of(match.value)[:2] not in _NINO_NEVER


def de_id_card(match: RuleMatch) -> bool:
    """Check the digit of travel documents (ICAO 9303: weights 7, 3, 1) over the first nine characters."""
    total = sum(int(char, 36) * _WEIGHTS[at % 3] for at, char in enumerate(match.value[:9]))
    return total % 10 == int(match.value[9])


def in_aadhaar(match: RuleMatch) -> bool:
    """Check Verhoeff; refuse palindromes and rows of years."""
    number = digits_of(match.value)
    if not aadhaar.is_valid(number) or not _stands_alone(match):
        return False
    is_row = _in_series(match) or _REST_BEHIND.match(match.after(5)) or _YEARS.match(number)
    return len(number) == len(match.value) or not is_row


def in_pan(match: RuleMatch) -> bool:
    """Check the kind of holder in the fourth letter. There is no public check digit."""
    return pan.is_valid(match.value)


def alone(match: RuleMatch) -> bool:
    """Accept any number that is no part of a longer one; for shapes without check digits."""
    return _has_digit(match.value) and _stands_alone(match)


def _has_digit(value: str) -> bool:
    return any(map(str.isdecimal, value))


# Network addresses, and addresses of crypto currencies.

_VERSION_BEFORE: Final = re.compile(r"(?:\bv|version|release|ver\.)\W{0,3}\Z", re.IGNORECASE)
_TRIVIAL_MACS: Final = frozenset({"000000000000", "FFFFFFFFFFFF"})


def ipv4(match: RuleMatch) -> bool:
    """Accept addresses of machines: no version number, mask, loopback, multicast or unspecified address."""
    if match.before(1) in {".", "-"} or re.match(r"[.-]?\w", match.after(2)):
        return False
    return not _VERSION_BEFORE.search(match.before(12)) and _names_machine(match.value)


def ipv6(match: RuleMatch) -> bool:
    """Require at least three groups and a digit, so that `a::b` in code is none."""
    value = match.value
    if match.before(1) in {":", "."} or re.match(r":|\.?\w", match.after(2)):
        return False
    groups = [group for group in value.split(":") if group]
    return len(groups) >= 3 and _has_digit(value) and _names_machine(value)


def _names_machine(value: str) -> bool:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return False
    mask = address.version == 4 and value.startswith(("0.", "255."))
    return not (address.is_loopback or address.is_unspecified or address.is_multicast or mask)


def mac(match: RuleMatch) -> bool:
    """Require one kind of separator; refuse longer fingerprints, all zeros and all ones."""
    number = match.value.replace(match.value[2], "").upper()
    is_cut = {match.before(1), match.after(1)} & {":", "-"}
    return not is_cut and len(number) == 12 and number not in _TRIVIAL_MACS


_BECH32: Final = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_BECH32M: Final = 0x2BC830A3
_PREFIX_BC: Final = (3, 3, 0, 2, 3)


def bitcoin_address(match: RuleMatch) -> bool:
    """Check Base58check, bech32 (BIP 173) or bech32m (BIP 350)."""
    value = match.value
    if value[0] in "13":
        return bitcoin.is_valid(value)
    if value != value.lower() and value != value.upper():
        return False
    return bitcoin.is_valid(value) or is_taproot(value.lower())


def is_taproot(value: str) -> bool:
    """Return whether the bech32m checksum of a lower-case address is right; versions 1 to 16."""
    data = [_BECH32.find(char) for char in value[3:]]
    if len(data) < 8 or -1 in data or not 1 <= data[0] <= 16:
        return False
    return bool(bitcoin.bech32_checksum([*_PREFIX_BC, *data]) == _BECH32M)


def ethereum_address(match: RuleMatch) -> bool:
    """Check EIP-55 if the case is mixed; one case carries no checksum and is accepted."""
    digits = match.value[2:]
    one_case = digits in (digits.lower(), digits.upper())
    return len(set(digits.lower())) >= 4 and (one_case or digits == eip55(digits))


def eip55(digits: str) -> str:
    """Return the forty digits in the case that EIP-55 asks for."""
    # Imported here: it takes longer than all other validators together, and few texts have such an address.
    from Crypto.Hash import keccak

    lower = digits.lower()
    digest = keccak.new(digest_bits=256, data=lower.encode()).hexdigest()
    return "".join(
        char.upper() if int(digest[at], 16) > 7 else char for at, char in enumerate(lower)
    )


# E-mail addresses.

_ENDINGS = "png jpg jpeg gif svg webp bmp css js jsx ts tsx json html htm xml txt yaml yml toml lock exe dll"
_FILE_ENDINGS: Final = frozenset(_ENDINGS.split())
_LOCAL_START: Final = "'%+-."


def email(match: RuleMatch) -> Span | None:
    """Check the lengths of labels; refuse names of files such as `logo@2x.png`, and ssh remotes."""
    value = match.value.lstrip(_LOCAL_START)
    start = match.end - len(value)
    local, _, domain = value.partition("@")
    labels = domain.split(".")
    if not local or ".." in local or local.endswith(".") or labels[-1].lower() in _FILE_ENDINGS:
        return None
    if any(not label or len(label) > 63 or label[0] == "-" or label[-1] == "-" for label in labels):
        return None
    if local == "git" and re.match(r":[\w~/]", match.after(2)):
        return None
    return start, match.end


# Secrets: tokens as against samples and placeholders.

_JWT_RUN: Final = re.compile(r"[A-Za-z0-9_.-]*")
_PEM_BODY: Final = re.compile(r"(?:[A-Za-z0-9+/=\s\\:,.]|-(?!-))*")
_PEM_END: Final = re.compile(r"-----END [A-Z0-9 ]{1,48}-----")
_PEM_LINE: Final = re.compile(r"[A-Za-z0-9+/=]{40}")
_VALUE: Final = re.compile(
    r"""(?:=>|:=|[:=]|\b(?:is|ist|est|es)\b)[\s"'`:]*(?P<value>[^\s"'`,;(){}<>\[\]]+)\Z"""
)
_STAND_IN: Final = re.compile(
    r"example|change_?me|your|placeholder|dummy|redacted|secret_?here|xxx|\*\*|\.\.\.|1234567|abcdef|"
    r"^(?:https?:|/|\./|\$|%|test|pass(?:word|wd)?|my_?pass|secret|token|none|null|true|false|\d{4}-\d\d)",
    re.IGNORECASE,
)
_CODE: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\Z|[A-Za-z_]+\Z|[A-Z][A-Z0-9_]+\Z")
_ENTROPY_MIN: Final = 2.7
_PASSWORD_STAND_IN: Final = re.compile(
    r"\*\*|xxx|\$|\{|^%[A-Z_]+%$|your|change_?me|password"
    r"|^(?:passwd|pass|pwd?|secret|example|user(?:name)?|postgres|root|guest|admin|test|foo|bar)\Z",
    re.IGNORECASE,
)


def entropy(value: str) -> float:
    """Return the bits per character of the value's own letters."""
    total = len(value)
    return -sum(n / total * math.log2(n / total) for n in Counter(value).values())


def token(match: RuleMatch) -> bool:
    """Require that the text behind the prefix varies like a random token, unlike slugs and samples."""
    value = match.value
    body = value[max(value.find("-", 0, 8), value.find("_", 0, 8)) + 1 :]
    is_random = entropy(body) >= 3.0 and _has_digit(body)
    return is_random and not re.search(r"example|xxxx|your", value, re.IGNORECASE)


def aws_key(match: RuleMatch) -> bool:
    """Refuse the key of AWS's own documentation."""
    return not match.value.endswith("EXAMPLE")


def assignment(match: RuleMatch) -> Span | None:
    """Find the value behind `password=` and the like: a mix of letters and digits, no sample, no code."""
    part = _VALUE.search(match.value)
    if not part or match.after(1) in {"(", "[", "{"}:
        return None
    value = part["value"].rstrip(".:!?") if len(part["value"]) > 12 else part["value"]
    if len(value) < 8 or _STAND_IN.search(value) or _CODE.match(value):
        return None
    has_letter = any(map(str.isalpha, value))
    if not (_has_digit(value) and has_letter) or entropy(value) < _ENTROPY_MIN:
        return None
    start = match.start + part.start("value")
    return start, start + len(value)


def jwt(match: RuleMatch) -> Span | None:
    """Require three parts, the first of which decodes to a header with an algorithm."""
    if match.before(1) in {".", "_", "-"}:
        return None
    end = match.run(_JWT_RUN, match.start)
    parts = match.text[match.start : end].rstrip("._-").split(".")
    if len(parts) < 3 or not parts[1] or not _is_header(parts[0]):
        return None
    return match.start, match.start + sum(map(len, parts[:5])) + len(parts[:5]) - 1


def _is_header(part: str) -> bool:
    try:
        header = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and ("alg" in header or "enc" in header)


def private_key(match: RuleMatch) -> Span | None:
    """Find a key from the first line to the last; one that is cut off goes as far as it looks like one."""
    body_end = match.run(_PEM_BODY, match.end)
    if not _PEM_LINE.search(match.text, match.end, min(body_end, match.end + 400)):
        return None
    end = _PEM_END.match(match.text, body_end, body_end + 64)
    return match.start, min(end.end() if end else body_end, match.start + match.spec.max_length)


def azure_client_secret(match: RuleMatch) -> Span | None:
    """Find the secret from the mark in the middle on; the three characters before it stay."""
    return match.start + 3, match.end


def telegram_bot(match: RuleMatch) -> Span | None:
    """Find the text behind the public number of the bot."""
    return match.start + match.value.index(":") + 1, match.end


def connection_string(match: RuleMatch) -> Span | None:
    """Find the password in a URL, from the user to the host; refuse samples of manuals."""
    scheme, _, rest = match.value.partition("://")
    user, _, password = rest.rpartition("@")[0].partition(":")
    if password == user or _PASSWORD_STAND_IN.search(password):
        return None
    return match.start + len(scheme) + 3, match.end


# Images in answers.

_HOST: Final = re.compile(r"[/\\]{2}(?:[^/?#\s)\\]{0,200}@)?([A-Za-z0-9.-]{1,255})")


def foreign_image(match: RuleMatch) -> bool:
    """Accept images unless all their hosts are options of the rule."""
    hosts = [host.lower() for host in _HOST.findall(match.value)]
    return not hosts or not set(hosts).issubset(match.spec.options)


def _standing_alone(is_valid: Callable[[str], bool]) -> Validator:
    return lambda match: is_valid(digits_of(match.value)) and _stands_alone(match)


_FUNCTIONS: Final[tuple[Validator, ...]] = (
    alone, assignment, aws_key, azure_client_secret, bitcoin_address, connection_string, de_id_card, email,
    ethereum_address, foreign_image, iban, in_aadhaar, in_pan, ipv4, ipv6, jwt, mac, payment_card,
    phone_international, phone_national, private_key, telegram_bot, token, uk_nino,
)  # fmt: skip
VALIDATORS: Final[Mapping[str, Validator]] = {
    "": lambda _: True,
    "de_tax_id": _standing_alone(idnr.is_valid),  # MOD 11, 10 and the rule of repeated digits
    "fr_nir": _standing_alone(nir.is_valid),  # MOD 97, Corsica included
    "uk_nhs": _standing_alone(nhs.is_valid),  # MOD 11
    "us_ssn": _standing_alone(ssn.is_valid),  # area, group and serial that are given out
    **{function.__name__: function for function in _FUNCTIONS},
}
"""Validators by the name of their function; without a name the pattern decides alone."""

COSTLY: Final = frozenset({"phone_international", "phone_national"})
"""Validators that take a good part of a millisecond for one match."""

TAKES_WHOLE: Final = frozenset({"foreign_image"})
"""Validators whose verdict is about the whole match: the search goes on behind what they refuse. Their patterns have no
bound, so a search of the rest of each match would take quadratic time.
"""

_FOR_THEIR_PATTERN: Final = frozenset({
    "", "assignment", "azure_client_secret", "connection_string", "de_id_card", "foreign_image", "jwt", "mac",
    "phone_national", "private_key", "telegram_bot",
})  # fmt: skip
FOR_ANY_PATTERN: Final = tuple(sorted(VALIDATORS.keys() - _FOR_THEIR_PATTERN))
"""Validators that work for any pattern: an operator's rule may name one of them."""
