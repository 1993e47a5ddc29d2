"""Names in a stream: held until they are read, decided together with what rules find, the same however text arrives."""

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from functools import cache

import pytest

from gateway.safety.findings import Action, Finding, Placeholders, Severity, apply
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
def rules_of(actions: str = "{ner.*: redact}", window: int = 8, allow: str = "") -> OutputRules:
    guard = f"{{model: ner, template: token_classifier, checks: [output], window_tokens: {window}}}"
    body = f"{{actions: {actions}, allow: [{allow}], guard: {{n: {guard}}}}}"
    text = f"safety: {{policies: {{default: {body}}}}}"
    policies = load_policies(text, lambda path: path, LABELS, ("ner",))
    output = policies.by_name["default"].output
    assert output is not None
    return output


def found_in(text: str) -> list[Finding]:
    """What the model says."""
    return [Finding("ner.per", *one.span(), Severity.MEDIUM) for one in NAME.finditer(text)]


class Reader:
    """Streams an answer, and reads windows as they come due, late or at once."""

    def __init__(self, rules: OutputRules, late: random.Random | None = None) -> None:
        self.filter = OutputFilter(rules)
        self.late = late
        self.open: AnswerWindow | None = None
        self.windows: list[tuple[int, str]] = []

    def push(self, tokens: Iterable[str]) -> str:
        shown = ""
        for token in tokens:
            shown += self.filter.push(token)
            self.open = self.open or self.due()
            if self.late is None or self.late.random() < 0.3:
                shown += self.answer()
        return shown

    def due(self) -> AnswerWindow | None:
        assert self.filter.windows is not None
        return self.filter.windows.due()

    def answer(self) -> str:
        window, self.open = self.open, None
        if window is None:
            return ""
        self.windows.append((window.start, window.text))
        return self.filter.settle(window, found_in(window.text))

    def finish(self) -> str:
        assert self.filter.windows is not None
        self.filter.windows.end()
        shown = ""
        while self.filter.unread:
            self.open = self.open or self.due()
            shown += self.answer()
        return shown + self.filter.finish()


def stream(rules: OutputRules, tokens: Sequence[str], seed: int) -> tuple[str, Reader]:
    reader, shown = Reader(rules, random.Random(seed)), ""
    for token in tokens:
        shown += reader.push([token])
        assert NAME.search(shown) is None, "a name, or a part of one, never leaves"
    return shown + reader.finish(), reader


@pytest.mark.parametrize("seed", range(60))
def test_stream_equals_whole_answer_for_any_split(seed: int) -> None:
    draw = random.Random(seed)
    rules = rules_of("{ner.*: redact, pii.*: redact}")
    text = " ".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 40)))
    ends = [0, *sorted(draw.sample(range(len(text)), len(text) // 4)), len(text)]
    tokens = [text[start:end] for start, end in itertools.pairwise(ends) if start < end]
    shown, reader = stream(rules, tokens, seed)
    again, other = stream(rules, tokens, seed + 1000)
    assert (again, other.windows) == (shown, reader.windows)
    findings = [*rules.scanner.scan(text), *reader.filter.entities]
    assert shown == apply(rules.table, text, findings, Placeholders((text,))).text
    for one in found_in(text):  # read in the whole answer
        assert any(f.start <= one.start and one.end <= f.end for f in findings), text[one.start :]


def test_name_inside_an_address_is_one_finding() -> None:
    rules = rules_of("{ner.*: redact, pii.*: redact}", window=64)
    text = "Write to anna.Smith@example.org and to Anna Smith."
    shown, reader = stream(rules, list(text), 0)
    assert shown == "Write to <EMAIL_1> and to <PER_1>."
    assert [one.action for one in reader.filter.review().actions].count(Action.REDACT) == 3


def test_a_name_at_the_end_of_a_window_is_left_to_the_next() -> None:
    reader = Reader(rules_of(window=4))
    assert reader.push(["we ", "met ", "Anna ", "Smith"]) == "we met "
    assert reader.push([" Okafor", " then", " and"]) == "<PER_1> "


def test_a_name_longer_than_a_window_is_decided_all_the_same() -> None:
    reader = Reader(rules_of(window=2))
    shown = reader.push(
        f"{word} "
        for word in [
            "Anna",
            "Smith",
            "Lee",
            "Okafor",
            "Smith",
            "Lee",
            "and",
            "more",
            "text",
            "here",
        ]
    )
    assert NAME.search(shown) is None
    assert shown.endswith(" and more text here ")


def test_a_refused_entity_ends_the_answer_before_it() -> None:
    reader = Reader(rules_of("{ner.per: block}"))
    assert reader.push(["It was ", "Anna", " who ", "said that. "]) == "It was "
    assert reader.filter.stopped == ("ner.per",)


def test_flagged_entities_delay_nothing_and_are_recorded() -> None:
    reader = Reader(rules_of("{ner.*: flag}"))
    assert reader.push(["Anna is here "]) == "Anna is here "
    assert reader.finish() == ""
    taken = reader.filter.review().actions
    assert [(one.rule, one.action) for one in taken] == [("ner.per", Action.FLAG)]


def test_what_nobody_has_read_is_dropped_when_the_answer_is_cut() -> None:
    filter_ = OutputFilter(rules_of())
    filter_.push("Anna said")
    assert filter_.finish(truncated=True) == ""
    assert filter_.hides(0, 4)
    assert not filter_.unread


def test_the_allow_list_lets_a_name_pass() -> None:
    reader = Reader(rules_of(allow="Anna Smith"))
    shown = reader.push(["ask Anna Smith or Ben"]) + reader.finish()
    assert shown == "ask Anna Smith or <PER_1>"


def due(windows: AnswerWindows, tokens: Sequence[str] = ()) -> AnswerWindow:
    for token in tokens:
        assert windows.due() is None
        windows.push(token)
    window = windows.due()
    assert window is not None
    return window


def test_windows_end_at_sentences_within_their_limit() -> None:
    windows = AnswerWindows(6)
    first = due(windows, ("The ship sailed", " at dawn today", ". ", "Mr. X", " left")[:3])
    assert (first.start, first.text, first.cut) == (0, "The ship sailed at dawn today. ", False)
    windows.settle(first, [])
    second = due(windows, ("Mr. X", " left", " us", " all", " there", " at", " six")[:6])
    assert second.text[second.context :] == "Mr. X left us all there "
    assert second.text[: second.context] == "The ship sailed at dawn today. "
    assert second.cut


def test_what_stands_before_a_window_is_not_found_again() -> None:
    windows, found = AnswerWindows(3), []
    for token in ("Anna ", "is ", "here ", "with ", "Ben", " now"):
        windows.push(token)
    for end in (False, False, True):
        if end:
            windows.end()
        window = due(windows)
        found.append([one.span for one in windows.settle(window, found_in(window.text))[1]])
    assert found == [[(0, 4)], [], [(18, 21)]]
