"""Decisions about findings do not depend on their order, and nothing of an overlap shows."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.safety.actions import (
    Action,
    ActionTable,
    Choice,
    Edit,
    Placeholders,
    apply,
    clusters,
    edited,
)
from gateway.safety.findings import Finding, Severity

TABLE = ActionTable(
    rules={
        "pii.*": Choice(Action.REDACT),
        "pii.ip": Choice(Action.FLAG),
        "pii.crypto.*": Choice(Action.REMOVE),
        "secret.*": Choice(Action.BLOCK),
        "injection.*": Choice(Action.ROUTE, "governed"),
        "injection.role": Choice(Action.ROUTE, "other"),
        "deny.*": Choice(Action.ALLOW),
    },
    severities={Severity.HIGH: Choice(Action.BLOCK), Severity.MEDIUM: Choice(Action.REDACT)},
    default=Choice(Action.ALLOW),
)
RULES = ("pii.email", "pii.ip", "pii.crypto.btc", "secret.key", "injection.role", "deny.list", "x")


def found(rule: str, start: int, end: int, severity: Severity = Severity.LOW) -> Finding:
    return Finding(rule, start, end, severity)


FINDINGS = st.lists(
    st.builds(
        lambda rule, start, length, severity: found(rule, start, start + length, severity),
        st.sampled_from(RULES),
        st.integers(0, 20),
        st.integers(0, 8),
        st.sampled_from(Severity),
    ),
    max_size=8,
)


def test_the_closest_name_decides_then_the_severity() -> None:
    def action(rule: str, severity: Severity = Severity.LOW) -> Action:
        return TABLE.choose(rule, severity).action

    assert action("pii.ip", Severity.CRITICAL) is Action.FLAG
    assert action("pii.email") is Action.REDACT
    assert action("pii.crypto.btc") is Action.REMOVE
    assert action("other") is Action.ALLOW
    assert action("other", Severity.MEDIUM) is Action.REDACT
    assert action("other", Severity.CRITICAL) is Action.BLOCK
    assert (
        ActionTable({"*": Choice(Action.REDACT)}).choose("a.b.c", Severity.LOW).action
        is Action.REDACT
    )


def test_a_prefix_fits_however_much_of_the_name_is_behind_it() -> None:
    table = ActionTable({"a.*": Choice(Action.REDACT), "*": Choice(Action.ALLOW)})
    for rule in ("a.b", "a.b.c", "a.b.c.d", "a.b.c.d.e"):
        assert table.choose(rule, Severity.LOW).action is Action.REDACT
    for rule in ("b", "b.a", "ab.c", "b.a.c.d"):
        assert table.choose(rule, Severity.LOW).action is Action.ALLOW


def test_actions_by_strength() -> None:
    names = ["ALLOW", "FLAG", "ROUTE", "REMOVE", "REDACT", "BLOCK"]
    assert [action.name for action in sorted(Action)] == names


def test_which_rules_can_change_a_text() -> None:
    for rule in ("pii.email", "pii.crypto.btc", "secret.key", "other"):
        assert TABLE.edits(rule), rule
    for rule in ("pii.ip", "injection.role", "deny.list"):
        assert not TABLE.edits(rule), rule
    assert not ActionTable().edits("other")


def test_overlapping_findings_become_one_placeholder() -> None:
    text = "mail john@10.0.0.1.example now"
    decision = apply(TABLE, text, [found("pii.email", 5, 18), found("pii.name", 10, 26)])
    assert decision.text == "mail <NAME_1> now"
    assert [(edit.start, edit.end) for edit in decision.edits] == [(5, 26)]


EACH = ActionTable({f"{action.name.lower()}.*": Choice(action) for action in Action})
"""Rules "flag.x", "block.x" and so on."""


@pytest.mark.parametrize("strongest", [Action.REMOVE, Action.REDACT, Action.BLOCK])
@pytest.mark.parametrize("first", [True, False])
def test_of_overlapping_findings_the_strongest_action_edits(strongest: Action, first: bool) -> None:
    """Whatever is longer, more severe, earlier or first by name."""
    weaker = [action for action in (Action.REMOVE, Action.REDACT) if action < strongest]
    name = strongest.name.lower()
    findings = [found(f"{name}.z", 3, 5) if first else found(f"{name}.z", 7, 9)]
    findings += [found(f"{one.name.lower()}.a", 4, 8, Severity.CRITICAL) for one in weaker]
    (edit,) = apply(EACH, "0123456789", findings).edits
    start = min(one.start for one in findings)
    end = max(one.end for one in findings)
    shown = "<Z_1>" if strongest is Action.REDACT else ""
    assert edit == Edit(start, end, f"{name}.z", strongest, shown)


@pytest.mark.parametrize(
    ("findings", "winner"),
    [
        ([found("redact.a", 0, 9), found("redact.b", 1, 3, Severity.HIGH)], "redact.b"),
        ([found("redact.a", 0, 3), found("redact.b", 2, 6)], "redact.b"),
        ([found("redact.b", 0, 3), found("redact.a", 2, 5)], "redact.b"),
        ([found("redact.b", 0, 3), found("redact.a", 0, 3)], "redact.a"),
    ],
)
def test_equal_actions_most_severe_then_longest_names(findings: list[Finding], winner: str) -> None:
    (edit,) = apply(EACH, "0123456789", findings).edits
    assert edit.rule == winner


def test_findings_that_touch_stay_apart() -> None:
    decision = apply(TABLE, "abcd", [found("pii.a", 0, 2), found("pii.b", 2, 4)])
    assert decision.text == "<A_1><B_1>"


def test_a_finding_without_length_decides_nothing_about_the_text() -> None:
    findings = [found("redact.a", 0, 5), found("block.b", 2, 2, Severity.CRITICAL)]
    (edit,) = apply(EACH, "0123456789", findings).edits
    assert (edit.rule, edit.action) == ("redact.a", Action.REDACT)


def test_behind_a_block_nothing_is_edited_any_more() -> None:
    placeholders = Placeholders()
    findings = [found("redact.a", 0, 2), found("block.b", 3, 5), found("redact.c", 6, 8)]
    decision = apply(EACH, "0123456789", findings, placeholders)
    assert [edit.rule for edit in decision.edits] == ["redact.a", "block.b"]
    assert decision.text == "<A_1>2"
    assert list(placeholders.values.items()) == [("<A_1>", "01")]


def test_a_block_names_its_rules_and_never_the_text() -> None:
    decision = apply(TABLE, "key SECRET", [found("secret.key", 4, 10), found("secret.a", 4, 8)])
    assert decision.blocked == ("secret.a", "secret.key")
    assert decision.text == "key "
    assert "SECRET" not in repr(decision)


def test_removing_leaves_nothing() -> None:
    assert apply(TABLE, "a btc b", [found("pii.crypto.btc", 1, 5)]).text == "a b"


@given(FINDINGS, st.randoms())
def test_the_order_of_findings_does_not_matter(findings: list[Finding], random: object) -> None:
    text = "abcdefghijklmnopqrstuvwxyz0123"
    shuffled = list(findings)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = apply(TABLE, text, findings), apply(TABLE, text, shuffled)
    assert first == second
    assert edited(text, first.edits) == first.text


@given(FINDINGS)
def test_no_character_of_a_redacted_finding_shows(findings: list[Finding]) -> None:
    text = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcd"
    decision = apply(TABLE, text, findings)
    hidden = {
        char
        for one in decision.taken
        if one.action in {Action.REDACT, Action.REMOVE, Action.BLOCK}
        for char in text[one.start : one.end]
    }
    kept, at = [], 0
    for edit in decision.edits:
        kept.append(text[at : edit.start])
        at = len(text) if edit.action is Action.BLOCK else edit.end
    kept.append(text[at:])
    assert not hidden & set("".join(kept))


def test_nothing_found_changes_nothing() -> None:
    assert apply(TABLE, "text", []).text == "text"
    assert clusters([(1, 1), (3, 5), (4, 8), (8, 9)]) == [(3, 8), (8, 9)]


def test_placeholders_of_the_request_are_used() -> None:
    placeholders = Placeholders()
    apply(TABLE, "a@b", [found("pii.email", 0, 3)], placeholders)
    decision = apply(
        TABLE, "c@d a@b", [found("pii.email", 0, 3), found("pii.email", 4, 7)], placeholders
    )
    assert decision.text == "<EMAIL_2> <EMAIL_1>"
