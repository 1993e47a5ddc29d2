"""scripts/mutate names what no test notices, and what is named equivalent exists."""

import ast
import json
from pathlib import Path

import pytest

from tests.mutation import __main__ as command
from tests.mutation.operators import mutants_of, mutated
from tests.mutation.targets import ROOT, SUITE, Group, Suite

GUARDS = '''"""Two guards."""

import logging

LIMIT = 3
_log = logging.getLogger(__name__)


def check(tenant: str, owner: str) -> None:
    if tenant != owner:
        raise PermissionError(f"{owner} has {1 + 1}")


def has_room(running: int) -> bool:
    """Whether another one may run."""
    _log.info("%d run", running + 1)
    return running < LIMIT


def never_called(count: int) -> int:
    return count
'''
TESTS = """import pytest

from guards import check, has_room


def test_only_the_owner():
    check("a", "a")
    with pytest.raises(PermissionError):
        check("a", "b")


def test_an_idle_one_has_room():
    assert has_room(0)
    assert not has_room(9)
"""
EVERY = {
    ("", "3", "4"),
    ("check", "tenant != owner", "tenant == owner"),
    ("check", "raise PermissionError(f'{owner} has {1 + 1}')", ""),
    ("has_room", "return running < LIMIT", "return None"),
    ("has_room", "running < LIMIT", "running <= LIMIT"),
    ("has_room", "running < LIMIT", "running >= LIMIT"),
    ("never_called", "return count", "return None"),
}
UNHELD = [
    "guards.py:5: '3' -> '4'",
    "guards.py:17 has_room: 'running < LIMIT' -> 'running <= LIMIT'",
    "guards.py:21 never_called: 'return count' -> 'return None'",
]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "guards.py").write_text(GUARDS)
    (tmp_path / "test_guards.py").write_text(TESTS)
    options = "--import-mode=importlib --disable-plugin-autoload -p xdist.plugin"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = .\naddopts = {options}\n")
    group = Group({"guards.py": ()}, ("test_guards.py",))
    return Suite((group,), tmp_path, tmp_path / "equivalent.toml")


@pytest.mark.long
def test_a_guard_that_is_held_and_one_that_is_not(
    suite: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--json", "--jobs", "2"], suite) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found == {"mutants": 7, "killed": 4, "survivors": UNHELD}
    assert (suite.root / "guards.py").read_text() == GUARDS

    # With a test the guard is held; only the lines of changed tests are found again.
    tests = suite.root / "test_guards.py"
    tests.write_text(f"{TESTS}\n\ndef test_the_limit():\n    assert not has_room(3)\n")
    assert command.main(["--json", "--jobs", "1", "--files", "guards"], suite) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found == {"mutants": 7, "killed": 6, "survivors": UNHELD[2:]}

    # What is known is not tried again, until its test changes.
    assert command.main(["--jobs", "1"], suite) == 0
    assert capfd.readouterr().err.count(" killed 0.0 s") == 6
    tests.write_text(tests.read_text() + "\n# changed\n")
    assert command.main(["--jobs", "1"], suite) == 0
    assert capfd.readouterr().err.count(" killed 0.0 s") < 6


def test_tests_that_fail_without_a_mutant_stop_the_run(
    suite: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    (suite.root / "test_guards.py").write_text(TESTS.replace("has_room(9)", "has_room(1)"))
    assert command.main(["--jobs", "1"], suite) == 2
    assert "test_an_idle_one_has_room" in capfd.readouterr().err


def test_what_is_changed() -> None:
    mutants = mutants_of("guards.py", GUARDS)
    assert {(one.where, one.was, one.becomes) for one in mutants} == EVERY
    assert mutants_of("guards.py", GUARDS, ["check"]) == mutants[1:3]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a is b", "a is not b"),
        ("a not in b", "a in b"),
        ("a and b", "a or b"),
        ("not a", "not not a"),
        ("True", "False"),
        ("a if b else c", "a if not b else c"),
        ("[a for a in b if c]", "[a for a in b if not c]"),
        ("f(2)", "f(3)"),
        ("a[0]", "a[1]"),
    ],
)
def test_an_expression_becomes_its_opposite(before: str, after: str) -> None:
    source = f"x = {before}\n"
    (mutant,) = mutants_of("x.py", source)
    assert ast.unparse(mutated(source, mutant)) == f"x = {after}"


def test_a_draw_is_the_same_for_a_seed(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    drawn = []
    for seed in ("1", "1", "2"):
        assert command.main(["--list", "--sample", "4", "--seed", seed], suite) == 0
        drawn.append(capfd.readouterr().out.splitlines())
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 4


def test_equivalent_mutants_are_few_and_known(suite: Suite) -> None:
    entry = (
        '[[equivalent]]\nfile = "guards.py"\nwhere = "{}"\nwas = "3"\nbecomes = "4"\nwhy = "x"\n'
    )
    for where in ("", "gone"):  # one of 7 is more than 5 %
        suite.equivalent.write_text(entry.format(where))
        with pytest.raises(SystemExit):
            command.main(["--list"], suite)


@pytest.mark.long
def test_the_equivalent_mutants_of_this_tree_exist_and_have_reasons() -> None:
    allowed = command.equivalent(SUITE)
    every = command.all_mutants(SUITE)
    assert not set(allowed) - {one.key for one in every}
    assert len(allowed) <= command.EQUIVALENT_MAX * len(every)
    assert all(len(why.split()) > 3 for why in allowed.values())


def test_the_targets_and_their_tests_exist() -> None:
    for group in SUITE.groups:
        for path in (*group.files, *group.tests):
            assert (ROOT / path).exists(), path
