"""Validators of addresses of crypto currencies."""

from typing import Final

from Crypto.Hash import keccak
from stdnum import bitcoin

from gateway.safety.rules.candidate import Candidate, Span

_BECH32: Final = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_BECH32M: Final = 0x2BC830A3
_PREFIX_BC: Final = (3, 3, 0, 2, 3)


def bitcoin_address(found: Candidate) -> Span | None:
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


def ethereum_address(found: Candidate) -> Span | None:
    """EIP-55 when the case is mixed; one case carries no checksum and is taken as it is."""
    digits = found.value[2:]
    if len(set(digits.lower())) < 4:
        return None
    if digits in (digits.lower(), digits.upper()) or digits == eip55(digits):
        return found.span
    return None


def eip55(digits: str) -> str:
    """The forty digits in the case that EIP-55 asks for."""
    lower = digits.lower()
    digest = keccak.new(digest_bits=256, data=lower.encode()).hexdigest()
    return "".join(
        char.upper() if int(digest[at], 16) > 7 else char for at, char in enumerate(lower)
    )
