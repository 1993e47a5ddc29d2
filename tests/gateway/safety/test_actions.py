"""Decisions about findings do not depend on their order, and nothing of an overlap shows."""

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.safety.findings import (
    Action,
    ActionTable,
    Choice,
    Edit,
    Finding,
    Placeholders,
    Severity,
    apply,
    clusters,
    edited,
)

TABLE = ActionTable(
    rules={
        "*": Choice(Action.REMOVE),
        "pii.*": Choice(Action.REDACT),
        "pii.ip": Choice(Action.FLAG),
        "pii.crypto.*": Choice(Action.REMOVE),
        "secret.*": Choice(Action.BLOCK),
        "injection.*": Choice(Action.ROUTE, "governed"),
    }
)
BY_SEVERITY = ActionTable(
    {"deny.*": Choice(Action.FLAG)},
    {Severity.HIGH: Choice(Action.BLOCK), Severity.MEDIUM: Choice(Action.REDACT)},
    Choice(Action.ALLOW),
)
CHOICES = [
    (TABLE, "pii.ip", Severity.CRITICAL, Action.FLAG),
    (TABLE, "pii.email", Severity.LOW, Action.REDACT),
    (TABLE, "pii.ip.x", Severity.LOW, Action.REDACT),
    (TABLE, "pii.crypto.a.b.c", Severity.LOW, Action.REMOVE),
    (TABLE, "x.pii.email", Severity.LOW, Action.REMOVE),
    (TABLE, "piix.email", Severity.LOW, Action.REMOVE),
    (BY_SEVERITY, "deny.list", Severity.CRITICAL, Action.FLAG),
    (BY_SEVERITY, "other", Severity.LOW, Action.ALLOW),
    (BY_SEVERITY, "other", Severity.MEDIUM, Action.REDACT),
    (BY_SEVERITY, "other", Severity.CRITICAL, Action.BLOCK),
]


@pytest.mark.parametrize(("table", "rule", "severity", "action"), CHOICES)
def test_the_closest_name_decides_then_the_severity(
    table: ActionTable, rule: str, severity: Severity, action: Action
) -> None:
    assert table.choose(rule, severity).action is action


def test_which_rules_can_change_a_text() -> None:
    assert [action.name for action in sorted(Action)][3:] == ["REMOVE", "REDACT", "BLOCK"]
    for rule in ("pii.email", "pii.crypto.btc", "secret.key", "other"):
        assert TABLE.edits(rule), rule
    for rule in ("pii.ip", "injection.role"):
        assert not TABLE.edits(rule), rule
    assert BY_SEVERITY.edits("other")
    assert not ActionTable().edits("other")


EACH = ActionTable({f"{action.name.lower()}.*": Choice(action) for action in Action})
"""Rules "flag.x", "block.x" and so on."""
TEXT = "0123456789"


def found(rule: str, start: int, end: int, severity: Severity = Severity.LOW) -> Finding:
    return Finding(rule, start, end, severity)


@pytest.mark.parametrize("strongest", [Action.REMOVE, Action.REDACT, Action.BLOCK])
@pytest.mark.parametrize("place", [(3, 5), (7, 9)])
def test_of_overlapping_findings_the_strongest_action_edits(
    strongest: Action, place: tuple[int, int]
) -> None:
    """Whatever is longer, more severe, earlier or first by name."""
    weaker = [action for action in (Action.REMOVE, Action.REDACT) if action < strongest]
    rule = f"{strongest.name.lower()}.z"
    findings = [found(rule, *place)]
    findings += [found(f"{one.name.lower()}.a", 4, 8, Severity.CRITICAL) for one in weaker]
    (edit,) = apply(EACH, TEXT, findings).edits
    start, end = min(one.start for one in findings), max(one.end for one in findings)
    assert edit == Edit(start, end, strongest, "<Z_1>" * (strongest is Action.REDACT))


DECISIONS = [
    # Of equal actions the most severe names the placeholder, then the longest, the first, the name.
    ([found("redact.a", 0, 9), found("redact.b", 1, 3, Severity.HIGH)], "<B_1>9"),
    ([found("redact.a", 0, 3), found("redact.b", 2, 6)], "<B_1>6789"),
    ([found("redact.b", 0, 3), found("redact.a", 2, 5)], "<B_1>56789"),
    ([found("redact.b", 0, 3), found("redact.a", 0, 3)], "<A_1>3456789"),
    # Findings that touch stay apart; one without length decides nothing.
    ([found("redact.a", 0, 2), found("redact.b", 2, 4)], "<A_1><B_1>456789"),
    ([found("redact.a", 0, 5), found("block.b", 2, 2, Severity.CRITICAL)], "<A_1>56789"),
    # Behind a block nothing shows.
    ([found("redact.a", 0, 2), found("block.b", 3, 5), found("redact.c", 6, 8)], "<A_1>2"),
    ([found("remove.a", 1, 9)], "09"),
    ([], TEXT),
]


@pytest.mark.parametrize(("findings", "shown"), DECISIONS)
def test_findings_become_one_text(findings: list[Finding], shown: str) -> None:
    assert apply(EACH, TEXT, findings).text == shown


def test_a_block_names_its_rules_and_never_the_text() -> None:
    placeholders = Placeholders()
    findings = [found("secret.key", 4, 10), found("secret.a", 4, 8), found("pii.x", 11, 12)]
    decision = apply(TABLE, "key SECRET x", findings, placeholders)
    assert decision.blocked == ("secret.a", "secret.key")
    assert "SECRET" not in repr(decision)
    assert not placeholders.values


FINDINGS = st.lists(
    st.builds(
        lambda rule, start, length, severity: found(rule, start, start + length, severity),
        st.sampled_from(
            ("pii.email", "pii.ip", "pii.crypto.btc", "secret.key", "injection.x", "x")
        ),
        st.integers(0, 20),
        st.integers(0, 8),
        st.sampled_from(Severity),
    ),
    max_size=8,
)


@given(FINDINGS, st.integers(0, 99))
def test_order_does_not_matter_and_nothing_redacted_shows(
    findings: list[Finding], seed: int
) -> None:
    text = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcd"
    shuffled = list(findings)
    Random(seed).shuffle(shuffled)
    decision = apply(TABLE, text, findings)
    assert decision == apply(TABLE, text, shuffled)
    assert edited(text, decision.edits) == decision.text
    hidden = {
        char
        for one in decision.actions
        if one.action in {Action.REDACT, Action.REMOVE, Action.BLOCK}
        for char in text[one.start : one.end]
    }
    kept = edited(text, [Edit(e.start, e.end, e.action, "") for e in decision.edits])
    assert not hidden & set(kept)


def test_unions_of_spans() -> None:
    assert clusters([(1, 1), (3, 5), (4, 8), (8, 9)]) == [(3, 8), (8, 9)]


def test_placeholders_of_the_request_are_used() -> None:
    placeholders = Placeholders()
    apply(TABLE, "a@b", [found("pii.email", 0, 3)], placeholders)
    both = [found("pii.email", 0, 3), found("pii.email", 4, 7)]
    assert apply(TABLE, "c@d a@b", both, placeholders).text == "<EMAIL_2> <EMAIL_1>"
