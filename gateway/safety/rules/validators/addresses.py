"""Validators of network addresses and of addresses of crypto currencies."""

import ipaddress
import re
from typing import Final

from stdnum import bitcoin

from gateway.safety.rules.spec import RuleMatch, Span

_VERSION_BEFORE: Final = re.compile(r"(?:\bv|version|release|ver\.)\W{0,3}\Z", re.IGNORECASE)
_TRIVIAL_MACS: Final = frozenset({"000000000000", "FFFFFFFFFFFF"})


def ipv4(found: RuleMatch) -> Span | None:
    """An address of some machine: no version number, mask, loopback, multicast or unspecified address."""
    if found.before(1) in {".", "-"} or re.match(r"[.-]?\w", found.after(2)):
        return None
    if _VERSION_BEFORE.search(found.before(12)):
        return None
    return found.span if _names_machine(found.value) else None


def ipv6(found: RuleMatch) -> Span | None:
    """At least three groups and a digit, so that ``a::b`` in code is none."""
    value = found.value
    if found.before(1) in {":", "."} or re.match(r":|\.?\w", found.after(2)):
        return None
    groups = [group for group in value.split(":") if group]
    if len(groups) < 3 or not any(char.isdecimal() for char in value):
        return None
    return found.span if _names_machine(value) else None


def _names_machine(value: str) -> bool:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return False
    mask = address.version == 4 and value.startswith(("0.", "255."))
    return not (address.is_loopback or address.is_unspecified or address.is_multicast or mask)


def mac(found: RuleMatch) -> Span | None:
    """One kind of separator, no longer fingerprint, neither all zeros nor all ones."""
    separator = found.value[2]
    if found.before(1) in {":", "-"} or re.match(r"[:-]", found.after(1)):
        return None
    number = found.value.replace(separator, "").upper()
    return found.span if len(number) == 12 and number not in _TRIVIAL_MACS else None


_BECH32: Final = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_BECH32M: Final = 0x2BC830A3
_PREFIX_BC: Final = (3, 3, 0, 2, 3)


def bitcoin_address(found: RuleMatch) -> Span | None:
    """Base58check, bech32 (BIP 173) or bech32m (BIP 350)."""
    value = found.value
    if value[0] in "13":
        return found.span if bitcoin.is_valid(value) else None
    if value != value.lower() and value != value.upper():
        return None
    return found.span if bitcoin.is_valid(value) or is_taproot(value.lower()) else None


def is_taproot(value: str) -> bool:
    """Whether the bech32m checksum of a lower-case address is right; versions 1 to 16."""
    data = [_BECH32.find(char) for char in value[3:]]
    if len(data) < 8 or -1 in data or not 1 <= data[0] <= 16:
        return False
    return bool(bitcoin.bech32_checksum([*_PREFIX_BC, *data]) == _BECH32M)


def ethereum_address(found: RuleMatch) -> Span | None:
    """EIP-55 when the case is mixed; one case carries no checksum and is taken as it is."""
    digits = found.value[2:]
    if len(set(digits.lower())) < 4:
        return None
    if digits in (digits.lower(), digits.upper()) or digits == eip55(digits):
        return found.span
    return None


def eip55(digits: str) -> str:
    """The forty digits in the case that EIP-55 asks for."""
    # Imported here: it takes longer than all other validators together, and few texts have such an address.
    from Crypto.Hash import keccak

    lower = digits.lower()
    digest = keccak.new(digest_bits=256, data=lower.encode()).hexdigest()
    return "".join(
        char.upper() if int(digest[at], 16) > 7 else char for at, char in enumerate(lower)
    )
