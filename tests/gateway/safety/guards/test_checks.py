"""Which checks are due when, what waits for them, and what their outcomes lead to."""

import pytest

from gateway.safety.findings import Action
from gateway.safety.guards.checks import Check, Checks, Guard
from gateway.safety.guards.families import GuardFailure, GuardVerdict, Outcome, family_of
from gateway.safety.settings import GuardSettings

SAFE, UNSAFE = GuardVerdict(flagged=False), GuardVerdict(True, ("S1",), 0.9)


def guard(name: str = "g", **keys: object) -> Guard:
    settings = GuardSettings.model_validate({"model": "m", "template": "llama_guard", **keys})
    return Guard(name, settings, family_of(settings))


def grown(checks: Checks, tokens: int, *, ended: bool = False) -> list[Check]:
    return checks.produced(tokens, lambda: "x" * tokens, ended)


def test_checks_hold_until_prompt_checks_are_decided() -> None:
    checks = Checks([guard("a"), guard("b")])
    assert checks.holds
    first, second = checks.begin()
    checks.decide(first, SAFE)
    assert checks.holds
    checks.decide(second, SAFE)
    assert not (checks.holds)
    assert not (checks.waits)


def test_windows_are_checked_one_at_a_time_and_the_end_last() -> None:
    checks = Checks([guard(checks=["output"], window_tokens=4)])
    assert checks.begin() == []
    assert not checks.holds
    assert grown(checks, 3) == []
    (first,) = grown(checks, 5)
    assert (first.tokens, first.answer, first.in_answer) == (5, "xxxxx", True)
    assert grown(checks, 20) == []
    assert checks.waits
    checks.decide(first, SAFE)
    (second,) = grown(checks, 20)
    assert grown(checks, 22, ended=True) == []
    checks.decide(second, SAFE)
    assert checks.waits
    (last,) = grown(checks, 22, ended=True)
    checks.decide(last, SAFE)
    assert not checks.waits
    assert grown(checks, 22, ended=True) == []
    assert checks.counts(in_answer=False) == {}
    assert checks.counts(in_answer=True) == {("guard.g.pass", Action.ALLOW): 3}


@pytest.mark.parametrize(("tokens", "due"), [(1000, 1), (0, 0)])
def test_without_windows_only_the_end_is_checked(tokens: int, due: int) -> None:
    checks = Checks([guard(checks=["output"], window_tokens=0)])
    checks.begin()
    assert grown(checks, tokens) == []
    assert len(grown(checks, tokens, ended=True)) == due
    assert checks.waits is bool(due)


def test_a_guard_that_holds_shows_nothing_before_the_end() -> None:
    checks = Checks([guard(checks=["output"], hold=True, window_tokens=4)])
    checks.begin()
    (window,) = grown(checks, 4)
    checks.decide(window, SAFE)
    assert checks.holds
    (last,) = grown(checks, 6, ended=True)
    assert checks.holds
    checks.decide(last, SAFE)
    assert not checks.holds


TAKEN: list[tuple[Outcome, dict[str, object], dict[str, Action]]] = [
    (SAFE, {}, {"pass": Action.ALLOW}),
    (UNSAFE, {}, {"S1": Action.BLOCK}),
    (UNSAFE, {"action": "flag"}, {"S1": Action.FLAG}),
    (
        GuardVerdict(True, ("S1", "S 2")),
        {"categories": ["S 2"]},
        {"S_2": Action.BLOCK, "S1": Action.FLAG},
    ),
    (GuardFailure.TIMEOUT, {}, {"timeout": Action.FLAG}),
    (GuardFailure.UNPARSABLE, {"fail": "closed"}, {"unparsable": Action.BLOCK}),
]


@pytest.mark.parametrize(("outcome", "keys", "taken"), TAKEN)
def test_what_an_outcome_leads_to(
    outcome: Outcome, keys: dict[str, object], taken: dict[str, Action]
) -> None:
    checks = Checks([guard(**keys)])
    decided = checks.decide(checks.begin()[0], outcome)
    assert decided is not None
    assert dict(decided.actions) == {f"guard.g.{name}": action for name, action in taken.items()}
    strongest = max(taken, key=lambda name: taken[name])
    assert (decided.rules, decided.action) == ((f"guard.g.{strongest}",), taken[strongest])


def test_restart_checks_the_new_answer_but_not_the_prompt() -> None:
    checks = Checks([guard(checks=["input", "output"], window_tokens=4)])
    (prompt,) = checks.begin()
    (stale,) = grown(checks, 4)
    checks.restart()
    assert checks.decide(stale, UNSAFE) is None
    assert checks.decide(prompt, SAFE) is not None
    assert len(grown(checks, 4)) == 1


def test_once_over_nothing_waits_and_nothing_is_decided() -> None:
    checks = Checks([guard()])
    (check,) = checks.begin()
    checks.close()
    assert checks.decide(check, UNSAFE) is None
    assert not checks.waits
    assert grown(checks, 10, ended=True) == []
