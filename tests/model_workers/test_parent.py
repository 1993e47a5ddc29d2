import os
import select
import subprocess
import sys

CHILD = """
import os, sys, threading
from model_workers.parent import exit_with_parent
exit_with_parent()
print(os.getpid(), flush=True)
threading.Event().wait(30)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), flush=True)
sys.stdin.readline()
"""


def test_the_process_ends_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([child], [], [], 10.0)[0] == [child]
    finally:
        os.close(child)
