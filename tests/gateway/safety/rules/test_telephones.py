"""The quick look at telephone numbers says what the library says."""

import random

import phonenumbers
import pytest
from phonenumbers import PhoneNumberType

from gateway.safety.rules.validators.contact import is_international, is_national

REGIONS = ("US", "CA", "GB", "DE", "FR", "ES", "IN", "IT", "CH", "BR", "AR", "MX", "JP", "RU", "AU")


def library(number: str, region: str | None) -> bool:
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(number, region))
    except phonenumbers.NumberParseException:
        return False


def examples() -> list[tuple[str, str]]:
    """Country calling code and national number of an example of every kind and region."""
    made = [
        phonenumbers.example_number_for_type(region, kind)
        for region in phonenumbers.SUPPORTED_REGIONS
        for kind in PhoneNumberType.values()
    ]
    return [
        (str(number.country_code), phonenumbers.national_significant_number(number))
        for number in made
        if number is not None
    ]


def nearby(digits: str, rng: random.Random) -> str:
    """``digits`` with a mistake, or none."""
    at = rng.randrange(len(digits))
    match rng.randrange(4):
        case 0:
            return digits
        case 1:
            return digits[:at] + rng.choice("0123456789") + digits[at + 1 :]
        case 2:
            return digits[:at] + digits[at + 1 :]
        case _:
            return digits[:at] + rng.choice("0123456789") + digits[at:]


@pytest.mark.parametrize("seed", range(3))
def test_international_numbers(seed: int) -> None:
    rng = random.Random(seed)
    for code, national in examples():
        digits = nearby(code + rng.choice(("", "", "0", "1", "8")) + national, rng)
        assert is_international(digits) == library("+" + digits, None), digits


@pytest.mark.parametrize("region", REGIONS)
def test_national_numbers(region: str) -> None:
    rng = random.Random(region)
    for code, national in rng.sample(examples(), 400):
        digits = nearby(rng.choice(("", "0", "1", "00", "011", code)) + national, rng)
        assert is_national(digits, region) == library(digits, region), digits
    for _ in range(400):
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(7, 15)))
        assert is_national(digits, region) == library(digits, region), digits
