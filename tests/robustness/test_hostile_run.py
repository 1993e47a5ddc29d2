"""What the run with hostile tenants counts as processes of a mesh."""

import subprocess
import sys

import psutil

from tests.robustness.hostile_run import family

FORKING = """
import os, subprocess, sys
if os.fork():
    child = subprocess.Popen(["cat"])
    print(child.pid, flush=True)
sys.stdin.read()
"""


def test_child_without_its_own_program_is_left_out() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert len(psutil.Process(parent.pid).children()) == 2
        assert [one.pid for one in family(parent.pid)] == [parent.pid, child]
        parent.kill()
