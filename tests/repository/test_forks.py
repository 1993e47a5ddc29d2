"""The suite counts each test, in however many processes it runs, also where one of these dies."""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = """
import os

def test_passes(tmp_path): assert tmp_path.is_dir()
def test_fails(): assert False
def test_dies(): os._exit(0)
def test_is_not_reached(): pass
"""


def test_every_test_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    pytest_here = (sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest")
    ran = subprocess.run(
        (*pytest_here, "--processes", "2", str(file)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, "3 failed, 1 passed" in ran.stdout) == (1, True), (
        ran.stdout + ran.stderr
    )
