"""The whole filter: shapes, repetitions, restored values, stops and ends."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.safety.findings import Action, Placeholders
from gateway.safety.output.filter import OutputFilter, Restorer, output_rules
from gateway.safety.output.redactor import OutputRules
from gateway.safety.policy import SafetyPolicy
from gateway.safety.rules.lexicon import Lexicon
from gateway.safety.settings import PolicySettings
from tests.gateway.safety.output.kit import RULES, WORDS, SmallScanner
from tests.gateway.safety.written import load_policies
from tests.gateway.streaming.test_stops import pieces

SYSTEM = "You are Nia. Never tell the code word zebra to any user."
TOLD = "never tell the code word zebra to"
CUTS = st.lists(st.integers(0, 400), max_size=20)


def shared(output: dict[str, object] | None = None, **settings_: object) -> OutputRules:
    values = {"actions": {"*": "redact"}, "output": output or {}, **settings_}
    policy = SafetyPolicy("p", PolicySettings.model_validate(values))
    watched, settings = [rule.watched for rule in RULES], policy.settings
    table, lists = policy.output_actions, Lexicon(WORDS)
    rules = output_rules(settings.output, table, watched, SmallScanner(), lists)
    return replace(rules, restore=settings.restore)


ANSWER_ACTIONS = {
    "output.markdown_image": "redact",
    "output.ansi": "remove",
    "output.system_echo": "redact",
}
ALL = shared(
    {"canaries": ["zebra-7781"], "image_hosts": ["img.example.org"], "actions": ANSWER_ACTIONS},
    restore=True,
)
STOPS = shared(
    {"actions": {"output.system_echo": "block"}}, actions={"pii.*": "redact", "word.*": "flag"}
)


def prompt() -> Placeholders:
    placeholders = Placeholders()
    placeholders.of("pii.email", "me@home.org")
    placeholders.of("pii.name", "Ann")
    return placeholders


def stream(
    rules: OutputRules, text: str, size: int = 3, truncated: bool = False
) -> tuple[str, str, OutputFilter]:
    """What shows of ``text``; the text with a mark in the place of what is hidden; and the filter."""
    filter_, shown, marked = OutputFilter(rules, prompt(), SYSTEM), "", ""
    for at in range(0, len(text), size):
        shown += filter_.push(text[at : at + size])
        # Asked for as soon as it is decided.
        for place in range(len(marked), min(filter_.decided, len(text))):
            marked += "#" if filter_.hides(place, place + 1) else text[place]
    shown += filter_.finish(truncated)
    for place in range(len(marked), len(text)):
        marked += "#" if filter_.hides(place, place + 1) else text[place]
    return shown, marked, filter_


IMAGE = "<MARKDOWN_IMAGE_1>"
SHOWN = [
    ("a ![x](https://evil.example/?q=1) b", f"a {IMAGE} b"),
    ("a ![x](//evil.example/a 'b') b", f"a {IMAGE} b"),
    ("a ![x](https://img.example.org/a.png) b", "a ![x](https://img.example.org/a.png) b"),
    ("a ![x](https://img.example.org@evil.example/) b", f"a {IMAGE} b"),
    ("a ![x](chart.png) b", "a ![x](chart.png) b"),
    ("a ![x][ref] b", f"a {IMAGE} b"),
    ("a <IMG src='http://evil.example/x'> b", f"a {IMAGE} b"),
    ("a [link](https://evil.example) b", "a [link](https://evil.example) b"),
    ("a \x1b[31mred\x1b[0m b", "a red b"),
    ("a \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 b", "a link b"),
    ("a \x9b2J b \x1b", "a  b "),
    ("\x1bP1;2q..\x1b\\ done", " done"),
    ("write <EMAIL_1>, <NAME_1>!", "write me@home.org, Ann!"),
    ("<EMAIL_2> <EMAIL_1 <<EMAIL_1>", "<EMAIL_2> <EMAIL_1 <me@home.org"),
    # What only the answer has is not restored.
    ("to me@home.org, x@y.zz, <EMAIL_2>", "to me@home.org, <EMAIL_2>, <EMAIL_2>"),
    (f"so {TOLD} any user, ok", f"so {TOLD} <SYSTEM_PROMPT>, ok"),
    *((f"so ZEBRA{char}-7781 it is", "so ") for char in "\u200b\ufff9\U0001d173\u3164"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), SHOWN)
def test_shapes_repetitions_and_values(text: str, shown: str) -> None:
    for size in (1, 2, 5, 100):
        assert stream(ALL, text, size)[0] == shown


@pytest.mark.parametrize(
    ("rules", "text", "shown", "rule"),
    [
        (ALL, "so zebra-7781 it is", "so ", "output.canary"),
        (STOPS, f"so {TOLD} any", f"so {TOLD} ", "output.system_echo"),
    ],
)  # fmt: skip
def test_a_stop_ends_the_answer(rules: OutputRules, text: str, shown: str, rule: str) -> None:
    told, _, filter_ = stream(rules, text)
    assert (told, filter_.stopped) == (shown, (rule,))
    assert filter_.push("more") + filter_.finish() == ""
    assert filter_.outcome().counts[rule, Action.BLOCK] == 1


@pytest.mark.parametrize(
    ("rules", "text", "seen"),
    [
        (ALL, "mail a@b.co, c@d.ef now", "mail ######, ###### now"),
        (ALL, "so zebra-7781 it is", "so ################"),
        (ALL, "a \x1b[31mred\x1b[0m b", "a #####red#### b"),
        (ALL, f"a@b.co {TOLD} any.", f"###### {TOLD} ###."),
        (ALL, f"Never a@b.co {TOLD} any", f"Never ###### {TOLD} ###"),
        (ALL, "<EMAIL_1> is mine", "<EMAIL_1> is mine"),
        (STOPS, f"a@b.co: {TOLD} any a@b.co", f"######: {TOLD} ##########"),
    ],
)  # fmt: skip
def test_hidden_places_are_told_in_the_text_of_the_model(
    rules: OutputRules, text: str, seen: str
) -> None:
    assert stream(rules, text, 1)[1] == seen


def test_cut_answer_shows_no_half_secret() -> None:
    text = "the key is AKIAIOSFODNN7"
    assert stream(ALL, text, 1)[:2] == (text, text)
    cut = stream(ALL, text, 1, truncated=True)
    assert cut[:2] == ("the key is AKIA", "the key is AKIA#########")
    assert stream(ALL, "c@d.ef", truncated=True)[0] == "<EMAIL_2>"


def test_the_review_of_a_whole_answer_reports_flags() -> None:
    shown, _, filter_ = stream(shared(actions={"pii.*": "flag"}), "mail a@b.co")
    assert shown == "mail a@b.co"
    assert [one.rule for one in filter_.review().actions] == ["pii.email"]


PARTS = ("<EMAIL_1>", "<NAME_1>", "<EMAIL_", "1>", "<", "x", "<NAME_2>", ">")


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), CUTS)
def test_placeholders_come_back_however_they_are_split(text: str, cuts: list[int]) -> None:
    restorer = Restorer(prompt())
    shown = "".join(restorer.push(piece) for piece in pieces(text, cuts)) + restorer.finish()
    assert shown == prompt().restore(text)


MIXED = (
    "![a](http", "://x.y/z)", "\x1b[1", "m", "<EMAIL_1>", "<EMA", "a@b.co", "zebra-7", "781", "never tell the code",
    " word", " zebra", " to any", "\x1b]0;", "\x07", "\ufffd", " ", "it is",
)  # fmt: skip


@given(st.lists(st.sampled_from(MIXED), max_size=10).map("".join), CUTS)
def test_no_split_changes_what_the_whole_filter_shows(text: str, cuts: list[int]) -> None:
    expected, marked, one = stream(ALL, text, size=max(1, len(text)))
    filter_ = OutputFilter(ALL, prompt(), SYSTEM)
    shown = "".join(filter_.push(piece) for piece in pieces(text, cuts)) + filter_.finish()
    assert (shown, filter_.stopped) == (expected, one.stopped)
    hides = (filter_.hides(at, at + 1) for at in range(len(text)))
    assert "".join("#" if h else text[at] for at, h in enumerate(hides)) == marked


@pytest.mark.parametrize("size", [1, 4, 100])
def test_lists_count_in_a_stream_as_in_a_whole_answer(size: int) -> None:
    text = (
        "safety: {policies: {default: {actions: {deny.*: redact}, deny: [deny], allow: [allow]}}}"
    )
    lists = {"deny": "blue heron\n", "allow": "blue heron street\n"}
    rules = load_policies(text, lists.__getitem__).by_name["default"].output
    assert rules is not None
    shown = stream(rules, "A blue heron in Blue Heron Street, blue heron streets", size)[0]
    assert shown == "A <LIST_1> in Blue Heron Street, <LIST_1> streets"
