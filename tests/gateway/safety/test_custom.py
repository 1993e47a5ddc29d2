"""Rules of the operator: checked at load, found in prompts, in what they encode, and in answers however cut."""

import base64
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.actions import Action, TakenAction
from gateway.safety.dry_run import move_labels
from gateway.safety.findings import Severity
from gateway.safety.inspector import Inspector, RequestInspection
from gateway.safety.output.filter import OutputFilter
from gateway.safety.policy import SafetyPolicies
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
  choose: [{labels: {p: next}, policy: next}]
  dry_run: next
"""


@cache
def compiled() -> SafetyPolicies:
    """Compiled when a test first asks: that takes seconds."""
    return load_policies(FILE)


def found(text: str, **labels: str) -> tuple[str, list[TakenAction]]:
    made = RequestInspection(Inspector(compiled()).choose("default", labels), [text])
    made.decide()
    return made.edited[0], [each for each in made.taken[0] if each.rule.startswith("custom.")]


def test_a_finding_gets_the_action_of_its_rule() -> None:
    text, (ticket,) = found("About TCK-123456 today")
    assert text == "About <TICKET_1> today"
    assert ticket == TakenAction("custom.ticket", Severity.HIGH, Action.REDACT, 6, 16)


def test_a_policy_that_names_the_rule_decides() -> None:
    _, (ticket,) = found("About TCK-123456 today", p="next")
    assert ticket.action is Action.BLOCK


def test_without_an_action_the_severity_decides() -> None:
    assert found("my AC 4111 1111 1111 1111.")[0] == "my ."


def test_a_validator_decides_which_matches_count() -> None:
    assert [each.action for each in found("card 4111111111111111")[1]] == [Action.BLOCK]
    assert found("card 9111111111111111")[1] == []


def test_what_is_encoded_is_found() -> None:
    hidden = base64.b64encode(b"pay to AC 4111 1111 1111 1111 now").decode()
    assert [each.rule for each in found(hidden)[1]] == ["custom.encoded.base64"]


def test_a_trial_counts_what_it_would_do_otherwise() -> None:
    made = Inspector(compiled())
    inspection = RequestInspection(made.choose("default", {}), ["TCK-123456"])
    inspection.decide()
    moves = made.count(inspection, made.rehearse(inspection))
    assert move_labels(moves) == ["custom.ticket:redact>block"]


def test_versions_follow_the_rules() -> None:
    version = compiled().by_name["default"].version
    changed = load_policies(FILE.replace("action: redact", "action: remove"))
    assert changed.by_name["default"].version != version


ANSWER = "First tck-000017, then AC 4111 1111 1111 1111 and TCK-12345, TCK-1234567, TCK-654321"
SHOWN = "First <TICKET_1>, then  and TCK-12345, TCK-1234567, <TICKET_2>"


def streamed(pieces: list[str]) -> str:
    output = compiled().by_name["default"].output
    assert output is not None
    filter_, shown = OutputFilter(output), ""
    for piece in pieces:
        shown += filter_.push(piece)
        assert SHOWN.startswith(shown)
    return shown + filter_.finish()


def test_in_answers_every_split_in_two_gives_the_same() -> None:
    for at in range(len(ANSWER) + 1):
        assert streamed([ANSWER[:at], ANSWER[at:]]) == SHOWN


def test_in_answers_every_split_gives_the_same() -> None:
    rng = random.Random(7)
    assert streamed(list(ANSWER)) == SHOWN
    for _ in range(200):
        assert streamed(random_pieces(ANSWER, rng)) == SHOWN


def test_a_block_ends_an_answer_before_the_match() -> None:
    output = compiled().by_name["default"].output
    assert output is not None
    filter_ = OutputFilter(output)
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
        (r"\d{6}\b", r"\p{Nope}\b", r"safety.rules.0.pattern: ticket: the engine refuses"),
        ("'(?i)\\bTCK-\\d{6}\\b'", "'(?i)a?'", r"safety.rules.0.pattern: ticket: position 0: .*empty"),
        ("name: account", "name: ticket", r"safety.rules.1.name: two rules have the name 'ticket'"),
        ("name: account", "name: My.Rule", r"safety.rules.1.name: 'My.Rule' should match"),
        ("validator: payment_card", "validator: jwt", r"safety.rules.2.validator: no validator 'jwt'; known"),
        ("      must_match: [AC 4111 1111 1111 1111]\n", "", r"safety.rules.1.must_match: is missing"),
        ("custom.ticket: block", "custom.tickets: block", r".*no rule 'custom.tickets'"),
        ("action: redact", "action: {route: nobody}", r"safety.rules.0.action: no model 'nobody'"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_key(old: str, new: str, message: str) -> None:
    assert old in FILE
    text = FILE.replace(old, new, 1)
    with pytest.raises(SettingsError, match=message):
        load_policies(text)


@pytest.mark.parametrize("name", FOR_ANY_PATTERN)
@given(st.text(min_size=1, max_size=40), st.text(max_size=9))
def test_validators_for_any_pattern_answer_for_any_match(name: str, value: str, near: str) -> None:
    spec = RuleSpec("custom.x", (), Severity.LOW, 40, name)
    match = RuleMatch(near + value + near, len(near), len(near) + len(value), spec)
    span = VALIDATORS[name](match)
    assert span is None or len(near) <= span[0] < span[1] <= len(near) + len(value)
