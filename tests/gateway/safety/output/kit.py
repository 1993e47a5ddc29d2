"""A small set of rules of every kind that the filter must follow, and texts that hold what they find."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import re2

from gateway.safety.findings import (
    Action,
    ActionTable,
    Choice,
    Finding,
    Placeholders,
    Severity,
    TextDecision,
    apply,
)
from gateway.safety.output.automaton import Automaton, WordList
from gateway.safety.output.redactor import OutputRules, Redactor
from gateway.safety.output.view import Scanner, ViewScanner
from gateway.safety.rules.spec import UNBOUNDED, Form, RuleSpec

Check = Callable[[str, int, int], tuple[int, int] | None]
"""The place of the finding for a match in a text, or None."""


def rule_spec(
    pattern: str,
    longest: int | None = None,
    before: int = 0,
    after: int = 0,
    name: str = "r",
    head: str = "",
) -> RuleSpec:
    """A rule of one pattern, None without a longest match, that looks so far around its matches."""
    forms, most = (Form(pattern, head=head),), UNBOUNDED if longest is None else longest
    return RuleSpec(
        name, forms, Severity.HIGH, most, context_chars=before, lookbehind=0, lookahead=after
    )


@dataclass(frozen=True)
class Rule:
    id: str
    pattern: str
    longest: int | None
    check: Check = lambda text, start, end: (start, end)
    before: int = 0
    after: int = 0
    cover: str = ""
    severity: Severity = Severity.HIGH

    @property
    def watched(self) -> RuleSpec:
        return rule_spec(self.cover or self.pattern, self.longest, self.before, self.after, self.id)


def luhn(text: str, start: int, end: int) -> tuple[int, int] | None:
    digits = [int(char) for char in text[start:end] if char.isdecimal()]
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return (start, end) if (sum(digits[-1::-2]) + doubled) % 10 == 0 else None


def mod97(text: str, start: int, end: int) -> tuple[int, int] | None:
    plain = text[start:end].replace(" ", "")
    number = "".join(str(int(char, 36)) for char in plain[4:] + plain[:4])
    return (start, end) if int(number) % 97 == 1 else None


def named(text: str, start: int, end: int) -> tuple[int, int] | None:
    return (start, end) if "passport" in text[max(0, start - 30) : start].lower() else None


def unweighed(text: str, start: int, end: int) -> tuple[int, int] | None:
    return None if text[end : end + 8].lstrip().startswith("kg") else (start, end)


def grown(text: str, start: int, end: int) -> tuple[int, int] | None:
    while end < len(text) and end < start + 60 and text[end].isalnum():
        end += 1
    return (start, end) if end - start >= 24 else None


def value_only(text: str, start: int, end: int) -> tuple[int, int] | None:
    return start + text[start:end].index("=") + 1, end


RULES: Final = (
    Rule(
        "pii.email", r"\b[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,4}[A-Za-z]{2,24}\b", 350
    ),
    Rule("pii.payment_card", r"\b\d(?:[ -]?\d){12,18}\b", 37, luhn),
    Rule("pii.iban", r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}\b", 64, mod97),
    Rule("pii.us_ssn", r"\b\d{3}-\d{2}-\d{4}\b", 11),
    Rule("pii.phone", r"(?:\+\d{1,3}[ -]?)?\(?\d{2,4}\)?(?:[ .-]?\d{2,4}){2,4}", 40),
    Rule("pii.ip", r"\b(?:\d{1,3}\.){3}\d{1,3}\b", 15),
    Rule("pii.passport", r"\b[A-Z]\d{8}\b", 9, named, before=30),
    Rule("pii.parcel", r"\b\d{5}-[A-Z]{2}\b", 8, unweighed, after=8),
    Rule("secret.aws_access_key", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", 20),
    Rule("secret.github_token", r"\bgh[pousr]_[A-Za-z0-9]{36}\b", 40),
    Rule("secret.key", r"\bsk-[A-Za-z0-9_-]{20,200}", 203),
    Rule("secret.session", r"\bsess_[a-z]{4}", 60, grown, cover=r"\bsess_[a-z]{4}[\pL\pN]{0,51}"),
    Rule("secret.jwt", r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}", None),
    Rule(
        "secret.private_key",
        r"-----BEGIN (?:[A-Z]{1,20} ){0,3}PRIVATE KEY-----[\s\S]*?"
        r"(?:-----END (?:[A-Z]{1,20} ){0,3}PRIVATE KEY-----|\z)",
        None,
    ),
    Rule(
        "secret.assignment",
        r"(?i)\b(?:password|token|api[_-]?key)\s{0,3}=[^\s'\x22]{8,100}",
        120,
        value_only,
    ),
    Rule("secret.hex", r"\b[0-9a-f]{32,64}\b", 64),
    Rule("word.any_case", r"(?i)\bproject (?:zebra|quokka)s?\b", 16),
    Rule("word.no_boundary", r"x\Bq\Bz|^#!shebang$", 9),
)
WORDS: Final = ("blue heron", "Straße", "heron", "ab", "abcd", "c++")


class SmallScanner:
    """Rules and `WORDS`, each on its own and from left to right."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._compiled = [(rule, re2.compile(rule.pattern)) for rule in rules]

    def scan(self, text: str) -> list[Finding]:
        found = []
        for rule, pattern in self._compiled:
            for match in pattern.finditer(text):
                span = rule.check(text, match.start(), match.end())
                if span is not None:
                    found.append(Finding(rule.id, *span, rule.severity))
        return found + list(_words(text))


def _words(text: str) -> Iterator[Finding]:
    lower = "".join(char.lower() if len(char.lower()) == 1 else char for char in text)
    for word in WORDS:
        plain, at = word.lower(), -1
        while (at := lower.find(plain, at + 1)) >= 0:
            end = at + len(plain)
            if not (_in_word(lower, at - 1) and _in_word(lower, at)) and not (
                _in_word(lower, end - 1) and _in_word(lower, end)
            ):
                yield Finding("deny.list", at, end, Severity.LOW)


def _in_word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and (text[at].isalnum() or text[at] == "_")


REDACT: Final = ActionTable({"*": Choice(Action.REDACT)})


@cache
def small_rules() -> OutputRules:
    return rules_of([rule.watched for rule in RULES], SmallScanner(), WORDS)


def rules_of(
    watched: Sequence[RuleSpec],
    scanner: Scanner,
    words: Sequence[str] = (),
    table: ActionTable | None = None,
) -> OutputRules:
    return OutputRules(Automaton(watched, WordList(words)), ViewScanner(scanner), table or REDACT)


def whole(rules: OutputRules, text: str) -> TextDecision:
    """What the filter must come to: the whole text, decided at once."""
    return apply(rules.table, text, rules.scanner.scan(text), Placeholders())


def check_pieces(rules: OutputRules, pieces: Sequence[str], expected: TextDecision) -> int:
    """Streams ``pieces``; returns the most characters that were held back. Fails where anything shows too early."""
    redactor, shown, most = Redactor(rules, Placeholders()), "", 0
    for piece in pieces:
        shown += redactor.push(piece)
        assert expected.text.startswith(shown), pieces
        assert not any(edit.start < redactor.decided < edit.end for edit in expected.edits), pieces
        most = max(most, redactor.pending_chars)
    shown += redactor.finish()
    assert shown == expected.text, pieces
    return most


SECRETS: Final = (
    "john.smith@example.com", "a@b.co", "4111 1111 1111 1111", "4111111111111111", "378282246310005",
    "DE89370400440532013000", "DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432", "123-45-6789",
    "+49 170 1234567", "(555) 123-4567", "192.168.10.1", "passport no. C12345678", "12345-AB", "12345-AB kg",
    "AKIAIOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9, "sk-" + "abcd1234" * 4, "sess_abcd" + "x1" * 10,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3.SflKxwRJSMeKKF2QT4fw",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc@d.com\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nxx", "password=hunter2hunter2", "API_KEY =abcdefghijk", "deadbeef" * 4,
    "Project Quokkas", "xqz", "#!shebang", "blue heron", "STRASSE straße", "abcd", "c++",
    "4111\u200b1111\u00ad11111111", "4111\ufff911111111\U0001d1731111",
    "４１１１ １１１１ １１１１ １１１１", "ＡＫＩＡIOSFODNN7EXAMPLE",
    "٤١١١ ١١١١ ١١١١ ١١١١",
)  # fmt: skip
PLAIN: Final = (
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18", "the quick brown fox", "4111 1111 1111 1112",
    "DE88370400440532013000",
    "DE", "AKIA", "-----BEGIN", "-----END PRIVATE KEY-----", "sess_abcdx", "C12345678", "\u200b", "\u00a0", " ", "\n",
    "-",
    "@", "é", "中文", ".", "a", "0", "_", "\x1b", "ß", "<EMAIL_1>", "K",
)  # fmt: skip


def random_text(rng: random.Random, samples: Sequence[str] = SECRETS) -> str:
    """Secrets and plain text, some of it broken, glued and mixed."""
    parts = []
    for _ in range(rng.randint(1, 7)):
        part = rng.choice(samples if rng.random() < 0.6 else PLAIN)
        if rng.random() < 0.25:
            part = part[: rng.randint(1, len(part))]
        if rng.random() < 0.15:
            part = part[rng.randrange(len(part)) :]
        if rng.random() < 0.1:
            at = rng.randint(0, len(part))
            part = part[:at] + rng.choice("\u200b\u00ad -._@0aA") + part[at:]
        parts.append(part)
        if rng.random() < 0.6:
            parts.append(rng.choice((" ", ", ", ". ", "\n", "'")))
    return "".join(parts)


def random_pieces(text: str, rng: random.Random) -> list[str]:
    pieces, at = [], 0
    longest = rng.choice((1, 3, 6, 20))
    while at < len(text):
        step = rng.randint(1, longest)
        pieces.append(text[at : at + step])
        at += step
    return pieces
