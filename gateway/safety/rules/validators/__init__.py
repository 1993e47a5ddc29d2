"""Validators: functions that decide whether a match is a finding. Rules refer to them by name."""

from collections.abc import Mapping
from typing import Final

from gateway.safety.rules.spec import RuleMatch, Span, Validator
from gateway.safety.rules.validators import addresses, contact, numbers, tokens


def accept(found: RuleMatch) -> Span | None:
    """The pattern decides alone."""
    return found.span


_NAMED: Final = (
    numbers.alone, tokens.assignment, tokens.aws_key, tokens.azure_client_secret, addresses.bitcoin_address,
    tokens.connection_string, numbers.de_id_card, numbers.de_tax_id, contact.email, addresses.ethereum_address,
    numbers.fr_nir, numbers.iban, numbers.in_aadhaar, numbers.in_pan, addresses.ipv4, addresses.ipv6, tokens.jwt,
    addresses.mac, numbers.payment_card, contact.phone_international, contact.phone_national, tokens.private_key,
    tokens.telegram_bot, tokens.token, numbers.uk_nhs, numbers.uk_nino, numbers.us_ssn,
)  # fmt: skip
VALIDATORS: Final[Mapping[str, Validator]] = {"": accept} | {one.__name__: one for one in _NAMED}
"""Each by the name of its function."""

COSTLY: Final = frozenset({"phone_international", "phone_national"})
"""Validators that take a good part of a millisecond for one match."""

FOR_ANY_PATTERN: Final = (
    "alone", "aws_key", "bitcoin_address", "de_tax_id", "email", "ethereum_address", "fr_nir", "iban", "in_aadhaar",
    "in_pan", "ipv4", "ipv6", "payment_card", "phone_international", "token", "uk_nhs", "uk_nino", "us_ssn",
)  # fmt: skip
"""Validators that answer for any text, whatever pattern matched it: an operator's rule may name one of them."""
