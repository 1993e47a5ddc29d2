"""A labelled set of sentences with planted numbers, built from a seed.

How it is built: for each kind, valid numbers come from `numbers` (check digits computed there, not by the libraries
the rules use) and near misses are the same numbers with one digit changed by one, so shape, issuer and country stay
right and only the check digit is wrong. Either goes into a sentence drawn from templates in English, German, French
and Spanish, between noise that ordinary letters hold: dates, prices, times, order numbers, versions, decimal
fractions, phone-like extensions. Kinds of which the rules promise something in context only (NHS number, tax id,
identity card, an Aadhaar number without gaps) always stand behind a word that names them; the other kinds do so in
half of the sentences. The templates were written by the people who wrote the rules: the figures say that the
machinery works, not how people write.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.gateway.safety.rules import numbers


@dataclass(frozen=True)
class Kind:
    rule: str
    make: Callable[[random.Random], str]
    names: tuple[str, ...]
    always_named: bool = False


@dataclass(frozen=True)
class Sentence:
    text: str
    rule: str
    start: int
    end: int
    valid: bool
    """False for a near miss, which must not be found."""


KINDS = (
    Kind(
        "pii.payment_card",
        numbers.card,
        ("card", "Kreditkarte", "carte", "tarjeta", "Visa card number"),
    ),
    Kind("pii.iban", numbers.iban, ("IBAN", "account", "Konto", "compte", "cuenta")),
    Kind("pii.uk_nhs", numbers.nhs, ("NHS number", "patient", "NHS no."), always_named=True),
    Kind(
        "pii.in_aadhaar",
        numbers.aadhaar,
        ("Aadhaar", "aadhaar number", "UIDAI id"),
        always_named=True,
    ),
    Kind(
        "pii.de_tax_id",
        numbers.de_tax_id,
        ("Steuer-ID", "Steueridentifikationsnummer", "tax ID", "IdNr."),
        always_named=True,
    ),
    Kind("pii.fr_nir", numbers.nir, ("numéro de sécurité sociale", "NIR", "sécu")),
    Kind(
        "pii.de_id_card",
        numbers.de_id_card,
        ("Personalausweis", "Ausweis Nr.", "ID card"),
        always_named=True,
    ),
    Kind("pii.bitcoin_address", numbers.bitcoin, ("BTC", "wallet", "address")),
    Kind("pii.ethereum_address", numbers.ethereum, ("ETH", "wallet", "contract")),
)

_FRAMES = (
    "Hi team, the {name} is {it}, please update it before {noise}.",
    "{noise}: customer gave {name} {it} on the phone.",
    "{it}",
    "{name}: {it}",
    "- {name} = {it}\n- {noise}",
    "Could you check {name} {it}? We talked on {noise}.",
    "Bitte {name} {it} bis {noise} prüfen.",
    "Guten Tag, hier {name} ({it}), Vorgang {noise}.",
    "Bonjour, voici {name} : {it}. Merci, {noise}.",
    "Hola, {name} es {it}, gracias. {noise}",
    '{{"note": "{noise}", "{name}": "{it}"}}',
    "| {noise} | {name} {it} | open |",
    "{noise}; {name};{it}; done",
    "El cliente dijo “{name} {it}” y {noise}.",
    "Ticket 客户 {name} {it} 😀 {noise}",
)
_UNNAMED = ("this", "it", "das hier", "ceci", "esto", "the value", "Nummer")


def sentences(seed: int, per_kind: int) -> Iterator[Sentence]:
    """For every kind ``per_kind`` valid numbers and as many near misses."""
    rng = random.Random(seed)
    for kind in KINDS:
        for _ in range(per_kind):
            yield _sentence(rng, kind, kind.make(rng), valid=True)
            yield _sentence(rng, kind, numbers.damaged(rng, kind.make(rng)), valid=False)


def _sentence(rng: random.Random, kind: Kind, number: str, *, valid: bool) -> Sentence:
    frames = [frame for frame in _FRAMES if "{name}" in frame] if kind.always_named else _FRAMES
    named = kind.always_named or rng.random() < 0.5
    name = rng.choice(kind.names if named else _UNNAMED)
    text = rng.choice(frames).format(name=name, it="\0", noise=noise(rng))
    start = text.index("\0")
    return Sentence(text.replace("\0", number), kind.rule, start, start + len(number), valid)


def noise(rng: random.Random) -> str:
    """A number that nobody needs to protect."""
    return rng.choice(
        (
            f"{rng.randrange(1990, 2030)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}",
            f"{rng.randrange(1, 29)}.{rng.randrange(1, 13)}.{rng.randrange(1990, 2030)}",
            f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}",
            f"order {rng.randrange(10**5, 10**8)}",
            f"INV-{rng.randrange(2000, 2030)}-{rng.randrange(10**4):04d}",
            f"{rng.randrange(10**4)}.{rng.randrange(100):02d} EUR",
            f"version {rng.randrange(9)}.{rng.randrange(20)}.{rng.randrange(99)}",
            f"{rng.random():.12f}",
            f"room {rng.randrange(100, 999)}",
            f"{rng.randrange(10**3)} of {rng.randrange(10**3)}",
        )
    )
