"""Valid numbers of each kind, in the ways that people write them."""

import random
import string

from stdnum import luhn, verhoeff
from stdnum.fr import nir as french
from stdnum.iban import calc_check_digits
from stdnum.iso7064 import mod_11_10

CARDS = "4:16 51:16 55:16 2221:16 34:15 37:15 6011:16 36:14 3530:16 622:16"
"""Beginnings and lengths."""
BITCOIN = (
    "1NEDqZPvTWRaoho48qXuLLsrYomMXPABfD", "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa",
    "3J98t1WpEZ73CNmQviecrnyiWrnqRhWNLy", "bc1qar0srrr7xfkvy5l643lydnw9re59gtzzwf5mdq",
    "bc1qrp33g0q5c5txsp9arysrx4k6zdkfs4nce4xj0gdcccefvpysxf3qccfmv3",
    "bc1p0xlxvlhemja6c4dqv22uapctqupfhlxm9h8z3k2e72q4k9hcz7vqzk5jj0",
)  # fmt: skip
ETHEREUM = (
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
    "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB", "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
    "0xC02aaA39b223FE8D0A0e5C4F27eAD9083C756Cc2", "0xdAC17F958D2ee523a2206206994597C13D831ec7",
)  # fmt: skip
"""Of EIP-55's own text and of well-known contracts."""


def digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice(string.digits) for _ in range(count))


def grouped(number: str, mark: str, *sizes: int) -> str:
    """The number in groups of these sizes; the last group is as long as it is."""
    parts = []
    for size in sizes:
        parts.append(number[:size])
        number = number[size:]
    return mark.join(filter(None, [*parts, number]))


def card(rng: random.Random, cards: str = CARDS, marks: str = "| |-") -> str:
    prefix, length = rng.choice(cards.split()).split(":")
    body = prefix + digits(rng, int(length) - len(prefix) - 1)
    number, mark = body + luhn.calc_check_digit(body), rng.choice(marks.split("|"))
    if length not in ("14", "15", "16"):
        return number
    return grouped(number, mark, *((4, 4, 4) if length == "16" else (4, 6)))


def iban(rng: random.Random) -> str:
    country, bank, count = rng.choice(
        [("DE", "", 18), ("GB", "NWBK", 14), ("NL", "ABNA", 10), ("AT", "", 16), ("CH", "", 17),
         ("IE", "AIBK", 14), ("SA", "", 20), ("LU", "", 16)]
    )  # fmt: skip
    bban = bank + digits(rng, count)
    number = f"{country}{calc_check_digits(f'{country}00{bban}')}{bban}"
    return number if rng.random() < 0.5 else grouped(number, " ", *(4,) * 8)


def nhs(rng: random.Random) -> str:
    while True:
        body = rng.choice("4679") + digits(rng, 8)
        check = -sum(int(char) * (10 - at) for at, char in enumerate(body)) % 11
        if check < 10:
            return grouped(f"{body}{check}", rng.choice(["", " "]), 3, 3)


def aadhaar(rng: random.Random) -> str:
    body = rng.choice("23456789") + digits(rng, 10)
    return grouped(body + verhoeff.calc_check_digit(body), rng.choice(["", " "]), 4, 4)


def de_tax_id(rng: random.Random) -> str:
    some = rng.sample(string.digits, 9)
    body = [*some, rng.choice(some)]
    while body[0] == "0":
        rng.shuffle(body)
    number = "".join(body)
    return grouped(number + mod_11_10.calc_check_digit(number), rng.choice(["", " "]), 2, 3, 3)


def nir(rng: random.Random) -> str:
    born = f"{rng.choice('12')}{rng.randrange(40, 99)}{rng.randrange(1, 13):02d}"
    place = rng.choice([*range(1, 20), *range(21, 96)])
    body = f"{born}{place:02d}{rng.randrange(1, 990):03d}{rng.randrange(1, 999):03d}"
    mark = rng.choice(["", " "])
    return grouped(body + french.calc_check_digits(body), mark, 1, 2, 2, 2, 3, 3)


def de_id_card(rng: random.Random) -> str:
    letters = "CFGHJKLMNPRTVWXYZ0123456789"
    body = rng.choice("LMNPRTVWXY") + "".join(rng.choice(letters) for _ in range(8))
    return body + str(sum(int(char, 36) * (7, 3, 1)[at % 3] for at, char in enumerate(body)) % 10)


def bitcoin(rng: random.Random) -> str:
    return rng.choice(BITCOIN)


def ethereum(rng: random.Random) -> str:
    return rng.choice(ETHEREUM)


def damaged(rng: random.Random, number: str) -> str:
    """The number with one digit (or letter, where it has no digits) changed: every check here notices that."""
    places = [at for at, char in enumerate(number) if char.isdecimal() and at > 3]
    if not places:
        at = rng.randrange(4, len(number))
        return number[:at] + ("q" if number[at] != "q" else "p") + number[at + 1 :]
    at = rng.choice(places)
    return number[:at] + str((int(number[at]) + rng.choice((1, 9))) % 10) + number[at + 1 :]
