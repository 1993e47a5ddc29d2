"""Validators: functions that decide whether a match is a finding. Rules refer to them by name."""

from collections.abc import Mapping
from typing import Final

from gateway.safety.rules.spec import RuleMatch, Span, Validator
from gateway.safety.rules.validators import addresses, contact, numbers, tokens


def accept(found: RuleMatch) -> Span | None:
    """The pattern decides alone."""
    return found.span


VALIDATORS: Final[Mapping[str, Validator]] = {
    "": accept,
    "alone": numbers.alone,
    "assignment": tokens.assignment,
    "aws_key": tokens.aws_key,
    "azure_client_secret": tokens.azure_client_secret,
    "bitcoin_address": addresses.bitcoin_address,
    "connection_string": tokens.connection_string,
    "de_id_card": numbers.de_id_card,
    "de_tax_id": numbers.de_tax_id,
    "email": contact.email,
    "ethereum_address": addresses.ethereum_address,
    "fr_nir": numbers.fr_nir,
    "iban": numbers.iban,
    "in_aadhaar": numbers.in_aadhaar,
    "in_pan": numbers.in_pan,
    "ipv4": addresses.ipv4,
    "ipv6": addresses.ipv6,
    "jwt": tokens.jwt,
    "mac": addresses.mac,
    "payment_card": numbers.payment_card,
    "phone_international": contact.phone_international,
    "phone_national": contact.phone_national,
    "private_key": tokens.private_key,
    "telegram_bot": tokens.telegram_bot,
    "token": tokens.token,
    "uk_nhs": numbers.uk_nhs,
    "uk_nino": numbers.uk_nino,
    "us_ssn": numbers.us_ssn,
}

COSTLY: Final = frozenset({"phone_international", "phone_national"})
"""Validators that take a good part of a millisecond for one match."""

FOR_ANY_PATTERN: Final = (
    "alone", "aws_key", "bitcoin_address", "de_tax_id", "email", "ethereum_address", "fr_nir", "iban", "in_aadhaar",
    "in_pan", "ipv4", "ipv6", "payment_card", "phone_international", "token", "uk_nhs", "uk_nino", "us_ssn",
)  # fmt: skip
"""Validators that answer for any text, whatever pattern matched it: an operator's rule may name one of them."""
