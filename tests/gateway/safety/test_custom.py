"""Rules of the operator: checked at load, found in prompts, in what they encode, and in answers however cut."""

import base64
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.findings import Action, Severity
from gateway.safety.inspector import RequestInspection
from gateway.safety.output.filter import OutputFilter
from gateway.safety.policy import SafetyPolicy
from gateway.safety.rules.spec import RuleMatch, RuleSpec
from gateway.safety.rules.validators import FOR_ANY_PATTERN, VALIDATORS
from sluice.errors import SettingsError
from tests.gateway.safety.output.kit import random_pieces
from tests.gateway.safety.written import load_policies

FILE = r"""
safety:
  rules:
    - name: ticket
      pattern: '(?i)\bTCK-\d{6}\b'
      action: redact
      must_match: [see TCK-123456., tck-000001]
      must_not_match: [TCK-12345, XTCK-123456]
    - name: account
      pattern: '\bAC \d{4}(?: \d{4}){3}\b'
      must_match: [AC 4111 1111 1111 1111]
    - {name: loyalty, pattern: '\b9\d{15}\b|\b4\d{15}\b', validator: payment_card, action: block,
       must_match: ['4111111111111111'], must_not_match: ['4111111111111112', '9111111111111111']}
  policies:
    default: {severity: {high: remove}, actions: {pii.payment_card: flag}}
    next: {severity: {high: remove}, actions: {custom.ticket: block, pii.payment_card: flag}}
"""


@cache
def policy(name: str) -> SafetyPolicy:
    return load_policies(FILE).by_name[name]


HIDDEN = base64.b64encode(b"pay to AC 4111 1111 1111 1111 now").decode()
PROMPTS = [
    (
        "default",
        "About TCK-123456 today",
        "About <TICKET_1> today",
        {"custom.ticket": Action.REDACT},
    ),
    ("next", "About TCK-123456 today", "About ", {"custom.ticket": Action.BLOCK}),
    ("default", "my AC 4111 1111 1111 1111.", "my .", {"custom.account": Action.REMOVE}),
    ("default", "card 4111111111111111", "card ", {"custom.loyalty": Action.BLOCK}),
    ("default", "card 9111111111111111", "card 9111111111111111", {}),
    ("default", HIDDEN, "", {"custom.encoded.base64": Action.REMOVE}),
]


@pytest.mark.parametrize(("name", "text", "shown", "actions"), PROMPTS)
def test_rules_count_in_prompts(
    name: str, text: str, shown: str, actions: dict[str, Action]
) -> None:
    inspection = RequestInspection(policy(name), [text])
    inspection.decide()
    (taken,) = inspection.actions
    own = [one for one in taken if one.rule.startswith("custom.")]
    assert (inspection.edited, {one.rule: one.action for one in own}) == ([shown], actions)
    assert all(one.severity is Severity.HIGH for one in own)


def test_versions_follow_the_rules() -> None:
    changed = load_policies(FILE.replace("action: redact", "action: remove"))
    assert changed.by_name["default"].version != policy("default").version


ANSWER = "First tck-000017, then AC 4111 1111 1111 1111 and TCK-12345, TCK-1234567, TCK-654321"
SHOWN = "First <TICKET_1>, then  and TCK-12345, TCK-1234567, <TICKET_2>"


def filter_of_answer() -> OutputFilter:
    output = policy("default").output
    assert output is not None
    return OutputFilter(output)


def test_every_split_of_an_answer_gives_the_same() -> None:
    rng = random.Random(7)
    splits = [[ANSWER[:at], ANSWER[at:]] for at in range(len(ANSWER) + 1)]
    for pieces in (*splits, list(ANSWER), *(random_pieces(ANSWER, rng) for _ in range(200))):
        filter_, shown = filter_of_answer(), ""
        for piece in pieces:
            shown += filter_.push(piece)
            assert SHOWN.startswith(shown)
        assert shown + filter_.finish() == SHOWN


def test_a_block_ends_an_answer_before_the_match() -> None:
    filter_ = filter_of_answer()
    assert filter_.push("no 41111111") + filter_.push("11111111 and then more") == "no "
    assert filter_.stopped == ("custom.loyalty",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("TCK-123456.,", "TCK-12345.,", r"safety.rules.0.must_match.0: ticket: does not match: 'see TCK-12345\.'"),
        ("[TCK-12345,", "[TCK-654321,", r"safety.rules.0.must_not_match.0: ticket: matches: 'TCK-654321'"),
        (r"\d{6}\b", r"\d+\b", r"safety.rules.0.pattern: ticket: position 12: a repeat without an upper bound"),
        (r"\d{6}\b", r"\d{6}(?=x)", r"safety.rules.0.pattern: ticket: the engine .*: invalid perl operator: \(\?="),
        (r"\d{6}\b", r"\d{900}\d{900}\d{900}", r"safety.rules.0.pattern: ticket: matches of up to 2704 characters"),
        ("'(?i)\\bTCK-\\d{6}\\b'", "'(?i)a?'", r"safety.rules.0.pattern: ticket: position 0: .*empty"),
        ("name: account", "name: ticket", r"safety.rules.1.name: two rules have the name 'ticket'"),
        ("name: account", "name: My.Rule", r"safety.rules.1.name: 'My.Rule' should match"),
        ("validator: payment_card", "validator: jwt", r"safety.rules.2.validator: no validator 'jwt'; known"),
        ("      must_match: [AC 4111 1111 1111 1111]\n", "", r"safety.rules.1.must_match: is missing"),
        ("custom.ticket: block", "custom.tickets: block", r".*no rule 'custom.tickets'"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_key(old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(SettingsError, match=message):
        load_policies(FILE.replace(old, new, 1))


@pytest.mark.parametrize("name", FOR_ANY_PATTERN)
@given(st.text(min_size=1, max_size=40), st.text(max_size=9))
def test_validators_for_any_pattern_answer_for_any_match(name: str, value: str, near: str) -> None:
    spec = RuleSpec("custom.x", (), Severity.LOW, 40, name)
    match = RuleMatch(near + value + near, len(near), len(near) + len(value), spec)
    span = VALIDATORS[name](match)
    assert isinstance(span, bool | None) or len(near) <= span[0] < span[1] <= len(near) + len(value)
