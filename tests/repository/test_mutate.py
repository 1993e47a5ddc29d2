"""scripts/mutate draws the same faults for a seed, and runs the tests near each of them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="scripts/mutate installs cosmic-ray")

from tests.mutation import ROOT, draw, faults_in, folder_of_tests, is_noticed, near_tests


def test_a_draw_is_the_same_for_a_seed() -> None:
    drawn = [draw(ROOT, ["jobs/core/"], 4, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 4


def test_tests_near_import_the_module() -> None:
    assert "tests/jobs/core/test_leases.py" in near_tests(ROOT, "jobs/core/leases.py")
    assert folder_of_tests(ROOT, "jobs/core/leases.py") == "tests/jobs/core"
    assert folder_of_tests(ROOT, "gateway/server.py") == "tests/gateway"


@pytest.mark.parametrize(
    ("check", "noticed"), [("one() == 1", True), ("one() > 0", False), ("one() == 3", None)]
)
def test_fault_is_judged_by_tests_that_pass_without_it(
    tmp_path: Path, check: str, noticed: bool | None
) -> None:
    test = f"from jobs.one import one\ndef test_one():\n    assert {check}\n"
    module = "def one() -> int:\n    return 1\n"
    for folder in ("jobs", "tests/jobs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "jobs/__init__.py").touch()
    (tmp_path / "jobs/one.py").write_text(module)
    (tmp_path / "tests/jobs/test_one.py").write_text(test)
    subprocess.run("git init -q . && git add .", shell=True, cwd=tmp_path, check=True)
    (fault,) = [one for one in faults_in(tmp_path, "jobs/one.py") if one.occurrence == 0]
    assert is_noticed(tmp_path, sys.executable, fault) is noticed
