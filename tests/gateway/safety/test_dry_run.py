"""A policy under trial is counted, never carried out."""

from gateway.safety.findings import Action, Severity, TakenAction, move_labels, moves_of
from gateway.safety.inspector import Inspector, RequestInspection
from tests.gateway.safety.written import load_policies

FILE = """
safety:
  policies:
    default: {actions: {pii.*: redact}}
    next: {actions: {pii.*: redact, pii.iban: block}, deny: [words.txt]}
  dry_run: next
"""
IBAN = "DE89370400440532013000"


def inspector(text: str = FILE, before: Inspector | None = None) -> Inspector:
    return Inspector(load_policies(text, lambda path: "zebra"), before)


def inspected(made: Inspector, *texts: str) -> RequestInspection:
    inspection = RequestInspection(made.choose("default", {}), texts)
    inspection.decide()
    return inspection


def counts(made: Inspector) -> tuple[int, int]:
    assert made.dry_run is not None
    return made.dry_run.texts, made.dry_run.changed


def test_moves_are_where_two_decisions_differ() -> None:
    now, then = (
        [TakenAction(rule, start, start + 1, Severity.LOW, action) for rule, action, start in taken]
        for taken in (
            [("a", Action.FLAG, 0), ("b", Action.FLAG, 1), ("c", Action.FLAG, 3)],
            [("a", Action.FLAG, 0), ("b", Action.BLOCK, 1), ("d", Action.FLAG, 5)],
        )
    )
    assert move_labels(moves_of(now, then)) == ["b:flag>block", "c:flag>none", "d:none>flag"]


def test_prompts_are_counted_and_left_alone() -> None:
    made = inspector()
    inspection = inspected(made, f"pay {IBAN}", "a zebra", "hello")
    moves = made.count(inspection, made.rehearse(inspection))
    assert move_labels(moves) == ["deny.list:none>flag", "pii.iban:redact>block"]
    assert inspection.edited[0] == "pay <IBAN_1>"
    assert counts(made) == (3, 1)


def test_answers_are_counted_and_left_alone() -> None:
    made = inspector()
    answer = made.answer(made.choose("default", {}), None, [], "")
    assert answer is not None
    assert answer.push(f"pay {IBAN}, zebra") + answer.finish() == "pay <IBAN_1>, zebra"
    outcome = answer.outcome()
    assert outcome.counts == {("pii.iban", Action.REDACT): 1}
    assert move_labels(outcome.moves) == ["deny.list:none>flag", "pii.iban:redact>block"]
    assert counts(made) == (1, 1)


def test_a_request_that_has_the_policy_already_is_not_counted() -> None:
    made = inspector(FILE.replace("safety:\n", "safety:\n  default: next\n"))
    inspection = inspected(made, IBAN)
    assert not made.count(inspection, made.rehearse(inspection))
    assert counts(made) == (0, 0)


def test_counts_go_on_while_the_policy_under_trial_stays() -> None:
    made = inspector()
    inspection = inspected(made, IBAN)
    made.count(inspection, made.rehearse(inspection))
    changed = FILE.replace("default: {actions: {pii.*: redact}}", "default: {}")
    made = inspector(changed, made)
    assert counts(made) == (1, 1)
    made = inspector(changed.replace("iban: block", "iban: remove"), made)
    assert counts(made) == (0, 0)
    assert inspector("", made).dry_run is None


def test_a_policy_that_is_switched_off_only_normalizes() -> None:
    made = inspector("safety: {policies: {default: {enabled: false, severity: {low: block}}}}")
    inspection = inspected(made, f"a\u200bb {IBAN}")
    assert inspection.edited[0] == f"ab {IBAN}"
    assert made.answer(inspection.policy, None, [], "") is None
