"""Who issues payment cards: ranges of leading digits and the lengths in use.

Source: ISO/IEC 7812 issuer identification numbers as the schemes publish them.
"""

from typing import Final

_RANGES: Final = (
    # first, last (as many digits as they have), lengths
    (4, 4, (13, 16, 19)),  # Visa
    (51, 55, (16,)),  # Mastercard
    (2221, 2720, (16,)),
    (34, 34, (15,)),  # American Express
    (37, 37, (15,)),
    (6011, 6011, (16, 17, 18, 19)),  # Discover
    (644, 649, (16, 17, 18, 19)),
    (65, 65, (16, 17, 18, 19)),
    (300, 305, (14, 16, 17, 18, 19)),  # Diners Club
    (3095, 3095, (14, 16, 17, 18, 19)),
    (36, 36, (14, 16, 17, 18, 19)),
    (38, 39, (14, 16, 17, 18, 19)),
    (3528, 3589, (16, 17, 18, 19)),  # JCB
    (62, 62, (16, 17, 18, 19)),  # UnionPay
    (81, 81, (16, 17, 18, 19)),
    (2200, 2204, (16, 17, 18, 19)),  # Mir
    (5018, 5018, (12, 13, 14, 15, 16, 17, 18, 19)),  # Maestro
    (5020, 5020, (12, 13, 14, 15, 16, 17, 18, 19)),
    (5038, 5038, (12, 13, 14, 15, 16, 17, 18, 19)),
    (5893, 5893, (12, 13, 14, 15, 16, 17, 18, 19)),
    (6304, 6304, (12, 13, 14, 15, 16, 17, 18, 19)),
    (6759, 6759, (12, 13, 14, 15, 16, 17, 18, 19)),
    (6761, 6763, (12, 13, 14, 15, 16, 17, 18, 19)),
    (60, 60, (16,)),  # RuPay
    (82, 82, (16,)),
    (508, 508, (16,)),
    (9792, 9792, (16,)),  # Troy
)


def is_issued(number: str) -> bool:
    """Whether a known issuer has numbers that start so and are that long."""
    return any(
        first <= int(number[: len(str(first))]) <= last and len(number) in lengths
        for first, last, lengths in _BY_FIRST_DIGIT.get(number[0], ())
    )


_BY_FIRST_DIGIT: Final = {
    str(digit): tuple(row for row in _RANGES if str(row[0])[0] == str(digit)) for digit in range(10)
}
