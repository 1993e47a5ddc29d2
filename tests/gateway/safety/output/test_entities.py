"""Names in a stream: held until they are read, decided together with what rules find, the same however text arrives."""

import random
import re
from collections.abc import Sequence
from functools import cache

import pytest

from gateway.safety.actions import Action, Placeholders, apply
from gateway.safety.findings import Finding, Severity
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.redactor import OutputRules
from gateway.safety.output.windows import AnswerWindow, AnswerWindows
from tests.gateway.safety.written import load_policies

NAME = re.compile(r"\b(?:Anna|Ben|Mia)(?: (?:Smith|Okafor|Lee))*\b|\b(?:Smith|Okafor|Lee)\b")
PIECES = (
    "Anna", "Smith", "Ben", "Mia", "Lee", "anna.smith@example.org", "Ben@example.org", "said", "J.", "that", "is",
    "wonderful.", "Really?", "\n", "Okafor", "AKIAQ3ZK7WPX2MNB5TRD", "the", "weather", "DE89370400440532013000", "Dr.",
)  # fmt: skip
LABELS = {"ner": ("O", "B-PER", "I-PER")}


@cache
def rules_of(actions: str, window: int = 8) -> OutputRules:
    guard = f"{{model: ner, template: token_classifier, checks: [output], window_tokens: {window}}}"
    text = f"safety: {{policies: {{default: {{actions: {actions}, guard: {{n: {guard}}}}}}}}}"
    policies = load_policies(text, models=LABELS, token_classifiers=("ner",))
    output = policies.by_name["default"].output
    assert output is not None
    return output


def found_in(text: str) -> list[Finding]:
    """What the model says."""
    return [
        Finding("ner.per", one.start(), one.end(), Severity.MEDIUM) for one in NAME.finditer(text)
    ]


def random_answer(draw: random.Random) -> str:
    return " ".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 40)))


def tokens_of(text: str, draw: random.Random) -> list[str]:
    tokens = []
    while text:
        size = draw.randrange(1, 7)
        tokens.append(text[:size])
        text = text[size:]
    return tokens


class Reader:
    """Reads windows as they come due, late or at once."""

    def __init__(self, filter_: OutputFilter) -> None:
        self.filter = filter_
        self.open: AnswerWindow | None = None
        self.windows: list[tuple[int, str]] = []

    def ask(self) -> None:
        assert self.filter.windows is not None
        if self.open is None:
            self.open = self.filter.windows.due()

    def answer(self) -> str:
        window, self.open = self.open, None
        if window is None:
            return ""
        self.windows.append((window.start, window.text))
        return self.filter.settle(window, found_in(window.text))


def stream(rules: OutputRules, tokens: Sequence[str], draw: random.Random) -> tuple[str, Reader]:
    filter_ = OutputFilter(rules)
    reader, shown = Reader(filter_), ""
    for token in tokens:
        shown += filter_.push(token)
        reader.ask()
        if draw.random() < 0.3:
            shown += reader.answer()
        assert NAME.search(shown) is None, "a name, or a part of one, never leaves"
    assert filter_.windows is not None
    filter_.windows.end()
    while filter_.unread:
        reader.ask()
        shown += reader.answer()
    return shown + filter_.finish(), reader


@pytest.mark.parametrize("seed", range(60))
def test_stream_equals_whole_answer_for_any_split(seed: int) -> None:
    draw = random.Random(seed)
    rules = rules_of("{ner.*: redact, pii.*: redact}")
    text = random_answer(draw)
    tokens = tokens_of(text, draw)
    shown, reader = stream(rules, tokens, draw)
    again, other = stream(rules, tokens, random.Random(seed + 1000))
    assert (again, other.windows) == (shown, reader.windows)
    findings = [*rules.scanner.scan(text), *reader.filter.entities]
    assert shown == apply(rules.table, text, findings, Placeholders((text,))).text
    for one in found_in(text):  # read in the whole answer
        assert any(f.start <= one.start and one.end <= f.end for f in findings), text[one.start :]


def test_name_inside_an_address_is_one_finding() -> None:
    rules = rules_of("{ner.*: redact, pii.*: redact}", window=64)
    text = "Write to anna.Smith@example.org and to Anna Smith."
    shown, reader = stream(rules, list(text), random.Random(0))
    assert shown == "Write to <EMAIL_1> and to <PER_1>."
    assert [one.action for one in reader.filter.review().taken].count(Action.REDACT) == 3


def test_a_name_at_the_end_of_a_window_is_left_to_the_next() -> None:
    rules = rules_of("{ner.*: redact}", window=4)
    filter_ = OutputFilter(rules)
    reader = Reader(filter_)
    for token in ("we ", "met ", "Anna ", "Smith"):
        assert filter_.push(token) == ""
    reader.ask()
    assert reader.answer() == "we met "
    for token in (" Okafor", " then", " and"):
        filter_.push(token)
        reader.ask()
    assert reader.answer() == "<PER_1> "


def test_a_name_longer_than_a_window_is_decided_all_the_same() -> None:
    filter_ = OutputFilter(rules_of("{ner.*: redact}", window=2))
    reader, shown = Reader(filter_), ""
    for token in ["Anna", "Smith", "Lee", "Okafor", "Smith", "Lee", "and", "more", "text", "here"]:
        shown += filter_.push(f"{token} ")
        reader.ask()
        shown += reader.answer()
    assert "Smith" not in shown
    assert "Lee" not in shown
    assert shown.endswith(" and more text here ")


def test_a_refused_entity_ends_the_answer_before_it() -> None:
    rules = rules_of("{ner.per: block}")
    filter_ = OutputFilter(rules)
    reader = Reader(filter_)
    for token in ("It was ", "Anna", " who ", "said that. "):
        filter_.push(token)
    reader.ask()
    assert reader.answer() == "It was "
    assert filter_.stopped == ("ner.per",)


def test_flagged_entities_delay_nothing_and_are_recorded() -> None:
    filter_ = OutputFilter(rules_of("{ner.*: flag}"))
    reader = Reader(filter_)
    assert filter_.push("Anna is here ") == "Anna is here "
    assert filter_.windows is not None
    filter_.windows.end()
    assert filter_.unread
    reader.ask()
    assert reader.answer() == ""
    assert [(one.rule, one.action) for one in filter_.review().taken] == [("ner.per", Action.FLAG)]


def test_what_nobody_has_read_is_dropped_when_the_answer_is_cut() -> None:
    filter_ = OutputFilter(rules_of("{ner.*: redact}"))
    filter_.push("Anna said")
    assert filter_.finish(truncated=True) == ""
    assert filter_.hides(0, 4)
    assert not filter_.unread


def test_the_allow_list_lets_a_name_pass() -> None:
    text = "safety: {policies: {default: {actions: {ner.*: redact}, allow: [x], guard: {n: {model: ner,"
    text += " template: token_classifier, checks: [output]}}}}}"
    policies = load_policies(text, lambda path: "Anna Smith", LABELS, token_classifiers=("ner",))
    output = policies.by_name["default"].output
    assert output is not None
    shown, _ = stream_all(output, "ask Anna Smith or Ben")
    assert shown == "ask Anna Smith or <PER_1>"


def stream_all(rules: OutputRules, text: str) -> tuple[str, OutputFilter]:
    filter_ = OutputFilter(rules)
    reader = Reader(filter_)
    filter_.push(text)
    assert filter_.windows is not None
    filter_.windows.end()
    shown = ""
    while filter_.unread:
        reader.ask()
        shown += reader.answer()
    return shown + filter_.finish(), filter_


def test_windows_end_at_sentences_within_their_limit() -> None:
    windows = AnswerWindows(6)
    for token in ("The ship sailed", " at dawn today", ". ", "Mr. X", " left"):
        windows.push(token)
    first = windows.due()
    assert first is not None
    assert (first.start, first.text, first.cut) == (0, "The ship sailed at dawn today. ", False)
    assert windows.due() is None
    windows.settle(first, [])
    assert windows.due() is None
    for token in (" us", " all", " there", " at", " six"):
        windows.push(token)
    second = windows.due()
    assert second is not None
    assert second.text[second.context :] == "Mr. X left us all there "
    assert second.text[: second.context] == "The ship sailed at dawn today. "
    assert second.cut


def test_what_stands_before_a_window_is_not_found_again() -> None:
    windows = AnswerWindows(3)
    for token in ("Anna ", "is ", "here ", "with ", "Ben", " now"):
        windows.push(token)
    first = windows.due()
    assert first is not None
    _, found = windows.settle(first, found_in(first.text))
    assert [(one.start, one.end) for one in found] == [(0, 4)]
    second = windows.due()
    assert second is not None
    assert second.context
    _, found = windows.settle(second, found_in(second.text))
    assert (second.text, found) == ("Anna is here with Ben ", [])
    windows.end()
    third = windows.due()
    assert third is not None
    _, found = windows.settle(third, found_in(third.text))
    assert [(one.start, one.end) for one in found] == [(18, 21)]
