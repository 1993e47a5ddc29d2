"""Text made to cost much: what is done for it is counted, never timed."""

import random

import pytest

from gateway.safety.findings import Finding, Placeholders
from gateway.safety.output.redactor import Redactor
from tests.gateway.safety.output.kit import RULES, WORDS, SmallScanner, rules_of, small_rules, whole

HOSTILE = {
    "one letter": "a" * 20_000,
    "number table": "1 " * 10_000,
    "number pairs": "12-34 " * 3_000,
    "mixed run": "A1b2" * 5_000,
    "addresses begun": "u@" * 10_000,
    "addresses without end": "a.b@c." * 3_000,
    "tokens begun": "eyJaaaaaaaaaa." * 1_400,
    "keys begun": "-----BEGIN PRIVATE KEY-----" * 700,
    "names of values": "password=" * 2_200,
    "combining marks": "a" + "\u0301" * 20_000,
    "invisible": "\u200b" * 20_000,
    "cards": "4111 1111 1111 1111 " * 1_000,
    "ideographs": "".join(chr(0x4E00 + i) for i in range(20_000)),
    "anything": "".join(random.Random(1).choice("ab1 -.@A_0+=:(\n") for _ in range(20_000)),
}
CHAINS = {"names of values", "cards", "anything"}
"""Matches that overlap without end, refused by their check: the scan starts again inside."""


class Counting(SmallScanner):
    def __init__(self) -> None:
        super().__init__()
        self.chars = 0

    def scan(self, text: str) -> list[Finding]:
        self.chars += len(text)
        return super().scan(text)


@pytest.mark.parametrize("name", HOSTILE)
def test_every_character_is_scanned_a_few_times_at_most(name: str) -> None:
    text, scanner = HOSTILE[name], Counting()
    rules = rules_of([rule.watched for rule in RULES], scanner, WORDS)
    redactor = Redactor(rules, Placeholders())
    shown = "".join(redactor.push(text[at : at + 5]) for at in range(0, len(text), 5))
    shown += redactor.finish()
    assert redactor.decided == len(text)
    assert scanner.chars < 12 * len(text)
    assert len(rules.automaton) < 2_000
    if name not in CHAINS:
        assert shown == whole(small_rules(), text).text
