"""Becomes another program that dies with its parent: ``python -I -S launch.py PARENT_PID PROGRAM ARGUMENT...``

The kernel's parent-death signal is set after the fork and survives the exec. Doing it in a process of its own keeps the
supervisor free of code between fork and exec, which is unsafe in a process with threads; it costs about 20 ms a start.
Only the standard library, and nothing of Sluice: this runs without site-packages.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Executes the program; returns only when it cannot."""
    parent, argv = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1  # it died before the signal was set
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
