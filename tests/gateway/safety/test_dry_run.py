"""A policy under trial is counted, never carried out."""

from gateway.safety.actions import Action, TakenAction
from gateway.safety.dry_run import DryRun, move_labels, moves_of
from gateway.safety.findings import Severity
from gateway.safety.inspector import Inspector, RequestInspection
from tests.gateway.safety.written import load_policies

FILE = """
safety:
  policies:
    default: {actions: {pii.*: redact}}
    next: {actions: {pii.*: redact, pii.iban: block}, deny: [words.txt]}
    other: {}
  dry_run: next
"""
IBAN = "DE89370400440532013000"


def inspector(text: str = FILE) -> Inspector:
    return Inspector(load_policies(text, lambda path: "zebra"))


def inspected(made: Inspector, *texts: str) -> RequestInspection:
    inspection = RequestInspection(made.choose("default", {}), texts)
    inspection.decide()
    return inspection


def taken(rule: str, action: Action, start: int) -> TakenAction:
    return TakenAction(rule, Severity.LOW, action, start, start + 1)


def test_moves_are_where_two_decisions_differ() -> None:
    now = [taken("a", Action.FLAG, 0), taken("b", Action.FLAG, 1), taken("c", Action.FLAG, 3)]
    then = [taken("a", Action.FLAG, 0), taken("b", Action.BLOCK, 1), taken("d", Action.FLAG, 5)]
    moves = moves_of(now, then)
    assert moves == {
        ("b", Action.FLAG, Action.BLOCK): 1,
        ("c", Action.FLAG, None): 1,
        ("d", None, Action.FLAG): 1,
    }
    assert move_labels(moves) == ["b:flag>block", "c:flag>none", "d:none>flag"]


def test_prompts_are_counted_and_left_alone() -> None:
    made = inspector()
    inspection = inspected(made, f"pay {IBAN}", "a zebra", "hello")
    moves = made.count(inspection, made.rehearse(inspection))
    assert move_labels(moves) == ["deny.list:none>flag", "pii.iban:redact>block"]
    assert inspection.edited[0] == "pay <IBAN_1>"
    counts = made.dry_run
    assert counts is not None
    assert (counts.texts, counts.changed) == (3, 1)
    assert str(counts).startswith("dry run of next@")
    assert str(counts).endswith(
        ": 1 of 3 texts changed; pii.iban:redact>block 1; deny.list:none>flag 1"
    )


def test_answers_are_counted_and_left_alone() -> None:
    made = inspector()
    inspection = inspected(made, "hello")
    answer = made.answer(inspection, "")
    assert answer is not None
    shown = answer.push(f"pay {IBAN}, zebra") + answer.finish()
    assert shown == "pay <IBAN_1>, zebra"
    outcome = answer.outcome()
    assert outcome.taken == {("pii.iban", Action.REDACT): 1}
    assert move_labels(outcome.moves) == ["deny.list:none>flag", "pii.iban:redact>block"]
    assert made.dry_run is not None
    assert (made.dry_run.texts, made.dry_run.changed) == (1, 1)


def test_a_request_that_has_the_policy_already_is_not_counted() -> None:
    made = inspector(FILE.replace("safety:\n", "safety:\n  default: next\n"))
    inspection = inspected(made, IBAN)
    assert not made.count(inspection, made.rehearse(inspection))
    assert made.dry_run is not None
    assert made.dry_run.texts == 0


def test_counts_go_on_while_the_policy_under_trial_stays() -> None:
    made = inspector()
    inspection = inspected(made, IBAN)
    made.count(inspection, made.rehearse(inspection))
    counts = made.dry_run
    changed = FILE.replace("default: {actions: {pii.*: redact}}", "default: {}")
    made = Inspector(load_policies(changed, lambda path: "zebra"), made)
    assert made.dry_run is counts
    text = changed.replace("iban: block", "iban: remove")
    made = Inspector(load_policies(text, lambda path: "zebra"), made)
    assert isinstance(made.dry_run, DryRun)
    assert made.dry_run is not counts
    made = Inspector(load_policies(""), made)
    assert made.dry_run is None


def test_a_policy_that_is_switched_off_only_normalizes() -> None:
    made = inspector("safety: {policies: {default: {enabled: false, severity: {low: block}}}}")
    inspection = inspected(made, f"a\u200bb {IBAN}")
    assert inspection.edited[0] == f"ab {IBAN}"
    assert made.answer(inspection, "") is None
