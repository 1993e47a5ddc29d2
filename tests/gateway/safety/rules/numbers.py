"""Valid numbers, made with check-digit code of its own: not the libraries that the rules trust."""

import hashlib
import random
import string

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"

# The dihedral group of ten elements and its permutations (Verhoeff).
_D = [
    [(a % 5 + (b if a < 5 else -b)) % 5 + 5 * ((a > 4) != (b > 4)) for b in range(10)]
    for a in range(10)
]
_P = [list(range(10)), [1, 5, 7, 6, 2, 8, 3, 0, 9, 4]]
for _i in range(2, 8):
    _P.append([_P[1][each] for each in _P[_i - 1]])


def digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice(string.digits) for _ in range(count))


def luhn_digit(number: str) -> str:
    total = 0
    for at, char in enumerate(reversed(number)):
        value = int(char) * (2 if at % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return str(-total % 10)


def card(rng: random.Random) -> str:
    prefix, length = rng.choice(
        [
            ("4", 16),
            ("51", 16),
            ("55", 16),
            ("2221", 16),
            ("34", 15),
            ("37", 15),
            ("6011", 16),
            ("36", 14),
            ("3530", 16),
            ("622", 16),
        ]
    )
    body = prefix + digits(rng, length - len(prefix) - 1)
    number = body + luhn_digit(body)
    style = rng.choice(["plain", " ", "-"])
    if style == "plain":
        return number
    if length == 16:
        return style.join(number[at : at + 4] for at in range(0, 16, 4))
    return style.join((number[:4], number[4:10], number[10:]))


def iban(rng: random.Random) -> str:
    country, bban = rng.choice(
        [
            ("DE", digits(rng, 18)),
            ("GB", "NWBK" + digits(rng, 14)),
            ("NL", "ABNA" + digits(rng, 10)),
            ("AT", digits(rng, 16)),
            ("CH", digits(rng, 17)),
            ("IE", "AIBK" + digits(rng, 14)),
            ("PL", digits(rng, 24)),
            ("SA", digits(rng, 20)),
            ("LU", digits(rng, 16)),
        ]
    )
    if country == "PL":  # its bank codes carry a check digit of their own
        bank = bban[:7]
        bban = (
            bank
            + str(-sum(w * int(d) for w, d in zip((3, 9, 7, 1, 3, 9, 7), bank, strict=True)) % 10)
            + bban[8:]
        )
    moved = "".join(str(int(char, 36)) for char in bban + country) + "00"
    number = f"{country}{98 - int(moved) % 97:02d}{bban}"
    return (
        number
        if rng.random() < 0.5
        else " ".join(number[at : at + 4] for at in range(0, len(number), 4))
    )


def nhs(rng: random.Random) -> str:
    while True:
        body = rng.choice("4679") + digits(rng, 8)
        check = 11 - sum(int(char) * (10 - at) for at, char in enumerate(body)) % 11
        if check != 10:
            number = body + str(check % 11)
            return number if rng.random() < 0.4 else f"{number[:3]} {number[3:6]} {number[6:]}"


def aadhaar(rng: random.Random) -> str:
    while True:
        body = rng.choice("23456789") + digits(rng, 10)
        state = 0
        for at, char in enumerate(reversed(body), 1):
            state = _D[state][_P[at % 8][int(char)]]
        number = body + str(next(each for each in range(10) if _D[state][each] == 0))
        if number != number[::-1]:
            return f"{number[:4]} {number[4:8]} {number[8:]}" if rng.random() < 0.7 else number


def de_tax_id(rng: random.Random) -> str:
    while True:
        some = rng.sample(string.digits, 9)
        body = [*some, rng.choice(some)]
        rng.shuffle(body)
        if body[0] == "0":
            continue
        product = 10
        for char in body:
            total = (int(char) + product) % 10 or 10
            product = total * 2 % 11
        number = "".join(body) + str((11 - product) % 10)
        return (
            number
            if rng.random() < 0.5
            else f"{number[:2]} {number[2:5]} {number[5:8]} {number[8:]}"
        )


def nir(rng: random.Random) -> str:
    born = f"{rng.choice('12')}{rng.randrange(40, 99)}{rng.randrange(1, 13):02d}"
    body = f"{born}{rng.randrange(1, 96):02d}{rng.randrange(1, 990):03d}{rng.randrange(1, 999):03d}"
    if body[5:7] == "20":
        body = body[:5] + "21" + body[7:]
    number = f"{body}{97 - int(body) % 97:02d}"
    if rng.random() < 0.5:
        return number
    return " ".join(
        (number[0], number[1:3], number[3:5], number[5:7], number[7:10], number[10:13], number[13:])
    )


def de_id_card(rng: random.Random) -> str:
    body = rng.choice("LMNPRTVWXY") + "".join(
        rng.choice("CFGHJKLMNPRTVWXYZ0123456789") for _ in range(8)
    )
    return body + str(sum(int(char, 36) * (7, 3, 1)[at % 3] for at, char in enumerate(body)) % 10)


def bitcoin(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return _bech32(rng)
    payload = bytes([rng.choice((0, 5))]) + rng.randbytes(20)
    payload += hashlib.sha256(hashlib.sha256(payload).digest()).digest()[:4]
    value, text = int.from_bytes(payload, "big"), ""
    while value:
        value, rest = divmod(value, 58)
        text = BASE58[rest] + text
    return "1" * (len(payload) - len(payload.lstrip(b"\0"))) + text


def _bech32(rng: random.Random) -> str:
    version, size, constant = rng.choice(((0, 20, 1), (0, 32, 1), (1, 32, 0x2BC830A3)))
    bits = "".join(f"{byte:08b}" for byte in rng.randbytes(size))
    bits += "0" * (-len(bits) % 5)
    data = [version] + [int(bits[at : at + 5], 2) for at in range(0, len(bits), 5)]
    check = _polymod([3, 3, 0, 2, 3, *data, 0, 0, 0, 0, 0, 0]) ^ constant
    data += [check >> 5 * (5 - at) & 31 for at in range(6)]
    return "bc1" + "".join(BECH32[each] for each in data)


def _polymod(values: list[int]) -> int:
    state = 1
    for value in values:
        top = state >> 25
        state = (state & 0x1FFFFFF) << 5 ^ value
        for at, generator in enumerate(
            (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
        ):
            state ^= generator if top >> at & 1 else 0
    return state


# Of EIP-55's own text and of well-known contracts.
ETHEREUM = (
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
    "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
    "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
    "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
    "0xC02aaA39b223FE8D0A0e5C4F27eAD9083C756Cc2",
    "0xdAC17F958D2ee523a2206206994597C13D831ec7",
)


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
