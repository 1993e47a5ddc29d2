"""Validators of addresses of machines."""

import ipaddress
import re
from typing import Final

from gateway.safety.rules.candidate import Candidate, Span

_VERSION_BEFORE: Final = re.compile(r"(?:\bv|version|release|ver\.)\W{0,3}\Z", re.IGNORECASE)
_TRIVIAL_MACS: Final = frozenset({"000000000000", "FFFFFFFFFFFF"})


def ipv4(found: Candidate) -> Span | None:
    """An address of some machine: no version number, mask, loopback, multicast or unspecified address."""
    if found.before(1) in {".", "-"} or re.match(r"[.-]?\w", found.after(2)):
        return None
    if _VERSION_BEFORE.search(found.before(12)):
        return None
    return found.span if _names_machine(found.value) else None


def ipv6(found: Candidate) -> Span | None:
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


def mac(found: Candidate) -> Span | None:
    """One kind of separator, no longer fingerprint, neither all zeros nor all ones."""
    separator = found.value[2]
    if found.before(1) in {":", "-"} or re.match(r"[:-]", found.after(1)):
        return None
    number = found.value.replace(separator, "").upper()
    return found.span if len(number) == 12 and number not in _TRIVIAL_MACS else None
