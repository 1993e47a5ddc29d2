"""A worker's process ends with its server, and on SIGTERM."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import pytest

BOUND_S: Final = 30.0
CHILD = """
import ctypes, os, sys
from model_workers.parent import exit_with_parent
exit_with_parent(lambda: print("ended", flush=True))
print(os.getpid(), flush=True)
while True:
    ctypes.CDLL(None).sleep(60)  # like the main thread of a stub, which no handler in Python interrupts
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip(), flush=True)
print(child.stdout.readline().decode().strip(), child.wait(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def parent() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        yield parent
        parent.kill()


def test_the_process_ends_with_its_parent(parent: "subprocess.Popen[str]") -> None:
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    try:
        assert select.select([child], [], [], BOUND_S)[0] == [child]
    finally:
        os.close(child)


def test_sigterm_ends_the_process_in_order(parent: "subprocess.Popen[str]") -> None:
    assert parent.stdout is not None
    os.kill(int(parent.stdout.readline()), signal.SIGTERM)
    assert parent.stdout.readline() == "ended 0\n"
