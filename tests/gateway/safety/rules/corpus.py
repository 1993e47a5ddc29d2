"""A labelled set of sentences with planted numbers, built from a seed.

Near misses are valid numbers with one digit changed by one, so shape, issuer and country stay right and only the check
digit is wrong. Either stands in a sentence in English, German, French or Spanish, between noise that ordinary letters
hold. Kinds of which the rules promise something in context only stand behind a word that names them; the others do so
in half of the sentences. The templates were written by the people who wrote the rules: the figures say that the
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
    names: str
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
    Kind("pii.payment_card", numbers.card, "card|Kreditkarte|carte|tarjeta|Visa card number"),
    Kind("pii.iban", numbers.iban, "IBAN|account|Konto|compte|cuenta"),
    Kind("pii.uk_nhs", numbers.nhs, "NHS number|patient|NHS no.", True),
    Kind("pii.in_aadhaar", numbers.aadhaar, "Aadhaar|aadhaar number|UIDAI id", True),
    Kind("pii.de_tax_id", numbers.de_tax_id, "Steuer-ID|Steueridentifikationsnummer|tax ID", True),
    Kind("pii.fr_nir", numbers.nir, "numéro de sécurité sociale|NIR|sécu"),
    Kind("pii.de_id_card", numbers.de_id_card, "Personalausweis|Ausweis Nr.|ID card", True),
    Kind("pii.bitcoin_address", numbers.bitcoin, "BTC|wallet|address"),
    Kind("pii.ethereum_address", numbers.ethereum, "ETH|wallet|contract"),
)

_FRAMES = (
    "Hi team, the {name} is {it}, please update it before {noise}.",
    "{noise}: customer gave {name} {it} on the phone.",
    "{it}",
    "{name}: {it}",
    "- {name} = {it}\n- {noise}",
    "Bitte {name} {it} bis {noise} prüfen.",
    "Guten Tag, hier {name} ({it}), Vorgang {noise}.",
    "Bonjour, voici {name} : {it}. Merci, {noise}.",
    '{{"note": "{noise}", "{name}": "{it}"}}',
    "| {noise} | {name} {it} | open |",
    "{noise}; {name};{it}; done",
    "El cliente dijo “{name} {it}” y {noise}.",
    "Ticket 客户 {name} {it} 😀 {noise}",
)
_UNNAMED = ("this", "it", "das hier", "ceci", "esto", "the value", "Nummer")
_NOISE = (
    "20##-0%-1#", "1#.0%.19##", "1#:2#:3#", "order %#####", "INV-20##-####", "%###.## EUR", "version %.#.##",
    "0.############", "room %##", "%## of %##",
)  # fmt: skip
"""Numbers that nobody needs to protect: `#` is any digit, `%` one but 0."""


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
    name = rng.choice(kind.names.split("|") if named else _UNNAMED)
    noise = filled(rng, rng.choice(_NOISE))
    text = rng.choice(frames).format(name=name, it="\0", noise=noise)
    start = text.index("\0")
    return Sentence(text.replace("\0", number), kind.rule, start, start + len(number), valid)


def filled(rng: random.Random, form: str, low: str = "123456789") -> str:
    """``form`` with a digit for each ``#`` and one of ``low`` for each ``%``."""
    draw = {"#": "0123456789", "%": low}
    return "".join(rng.choice(draw[char]) if char in draw else char for char in form)
