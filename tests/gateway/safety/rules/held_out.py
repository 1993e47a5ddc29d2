"""Texts with structured personal data of several countries, in two splits.

The rules were tuned on `TUNING`; the test holds their bounds on `HELD_OUT`, whose countries and sentences are others
and on which nothing was tuned. Telephone numbers follow the way people of a country write them: ``#`` is any digit,
``%`` one from 2 to 9. So many of them are not given out, as in any collection of made-up texts.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.gateway.safety.rules import numbers
from tests.gateway.safety.rules.corpus import filled

RULES: Mapping[str, frozenset[str]] = {
    "phone": frozenset({"pii.phone", "pii.phone_national"}),
    "card": frozenset({"pii.payment_card"}),
    "iban": frozenset({"pii.iban"}),
    "ssn": frozenset({"pii.us_ssn"}),
    "email": frozenset({"pii.email"}),
    "ip": frozenset({"pii.ipv4"}),
}


@dataclass(frozen=True)
class Split:
    phones: Sequence[str]
    with_phone: Sequence[str]
    without: Sequence[str]


@dataclass(frozen=True)
class Marked:
    """A text, and the places of what a rule has to find, by kind."""

    text: str
    places: Sequence[tuple[str, int, int]]


TUNING = Split(
    phones=(
        "(%##) %##-####", "%##-%##-####", "%##.%##.####x###", "+1-%##-%##-####", "001-%##-%##-####x####", "%##%######",
        "+49(0)30 #######", "(030) #######", "0171 #######", "0711/#######", "+33 (0)6 ## ## ## ##", "06 ## ## ## ##",
        "0142######", "020 7946 0###", "(01632) 960###", "+44(0)1632960###", "+34 6## ### ###", "91# ## ## ##",
        "+39 347 #######", "(021) %###-####", "11 9%###-####",
    ),
    with_phone=(
        "My phone number is {phone}.", "Call me at {phone} tomorrow.", "You reach {name} on {phone} or {email}.",
        "Tel: {phone}, card {card}", "Telefon: {phone}", "Mi teléfono es {phone}, IBAN {iban}", "Text {phone} please.",
        "Mon numéro de téléphone est le {phone}.", "Fax {phone}\nfrom {ip}",
    ),
    without=(
        "Invoice {count} of {date} is {price}.", "My SSN is {ssn}.",
        "The call about ticket {count} took {few} minutes.",
        "Server {ip} sent {long} bytes.", "Card {card}, IBAN {iban}", "Contact us about account {long}.",
        "Phone model {few}-{count} costs {price}.",
    ),
)  # fmt: skip

HELD_OUT = Split(
    phones=(
        "(%##) %##-####", "%##-%##-#### x##", "1-%##-%##-####", "+43 660 #######", "0664 ### ## ##", "(01) #######",
        "044 ### ## ##", "+41 79 ### ## ##", "0475 ## ## ##", "+32 2 ### ## ##", "02 ### ## ##", "21# ### ###",
        "+351 91# ### ###", "22 ## ## ##", "+47 4## ## ###", "+45 ## ## ## ##", "40 ## ## ##", "60# ### ###",
        "+420 60# ### ###", "06 30 ### ####", "010-%###-####", "138 #### ####", "+86 138 #### ####", "021 ### ####",
        "03 #### ####", "+7 (9##) ###-##-##", "8 (9##) ###-##-##", "(02) %### ####", "+64 21 ### ####",
    ),
    with_phone=(
        "Please ring {phone} after six.", "{name} is available under phone {phone}.", "Mobile: {phone}",
        "Our hotline {phone} is open until {date}.", "Contact {name} by e-mail ({email}) or telephone ({phone}).",
        "WhatsApp {phone}; he paid with {card}.", "Rufen Sie mich an: Tel. {phone}", "Puhelin {phone}, {ip}",
        "Telefone para contacto: {phone}", "Tlf. {phone} / {iban}", "Dial {phone}, then say {few}.",
        "I lost my phone, the number was {phone}.",
    ),
    without=(
        "Receipt {count}, paid {price} on {date}.", "Her social security number: {ssn}", "{email} wrote from {ip}.",
        "He gave {card} and later {iban}.", "Order {long} has {few} items of {price}.", "Batch {count} ran on {date}.",
        "The phone of room {few} is broken since {date}.", "Population {long}, area {count}, density {few}.",
        "We call it build {count}.", "Ring size {few}, stock number {count}.",
    ),
)  # fmt: skip

_SLOT = re.compile(r"\{(\w+)\}")
_CARDS = (
    "4:16 4:13 4:19 51:16 2221:16 34:15 37:15 6011:16 65:16 36:14 38:14 305:14 3530:16 2131:15 1800:15 5018:12 6304:12"
    " 6761:12 622:16"
)
_VALUES = {
    "date": "19%#-1%-0%|0%.1%.20##|%/1%/19##",
    "price": "%###.## EUR|%##.## EUR",
    "few": "%#|%##|%##|%##",
    "count": "%#######|%########|%########|%########",
    "long": "%###########|%############|%############",
}
_NAMES = ("Ada Berg", "Jonas Novak", "Lucía Silva", "Mehmet Kaya", "Yuki Tanaka")


def texts(split: Split, seed: int, count: int) -> Iterator[Marked]:
    """Yield ``count`` texts; half of them have a telephone number."""
    rng = random.Random(seed)
    for _ in range(count):
        frames = split.with_phone if rng.random() < 0.5 else split.without
        yield _marked(rng, rng.choice(frames), split)


def _marked(rng: random.Random, frame: str, split: Split) -> Marked:
    text, places, at = "", list[tuple[str, int, int]](), 0
    for slot in _SLOT.finditer(frame):
        text += frame[at : slot.start()]
        value, at = _value(rng, slot[1], split), slot.end()
        if slot[1] in RULES:
            places.append((slot[1], len(text), len(text) + len(value)))
        text += value
    return Marked(text + frame[at:], places)


def _value(rng: random.Random, kind: str, split: Split) -> str:
    name = rng.choice(_NAMES)
    match kind:
        case "phone":
            return filled(rng, rng.choice(split.phones), "23456789")
        case "card":
            return numbers.card(rng, _CARDS, "||| |-")
        case "iban":
            return numbers.iban(rng)
        case "ssn":
            return f"{rng.randrange(1, 666):03}-{rng.randrange(1, 100):02}-{rng.randrange(1, 10000):04}"
        case "email":
            host = rng.choice(("mail", "corp"))
            return f"{name.replace(' ', '.').lower()}@{host}.example.org"
        case "ip":
            return ".".join(str(rng.randrange(1, 224)) for _ in range(4)).replace("127.", "81.")
        case "name":
            return name
    return filled(rng, rng.choice(_VALUES[kind].split("|")))
