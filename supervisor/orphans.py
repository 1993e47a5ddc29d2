"""Nothing that a supervisor started outlives it, however it ends: a small program kills what is left.

`python -I -S orphans.py` reads one line for every change, the process groups that live now. At the end of its input the
supervisor is gone, and it kills the groups of the last line. It runs without site-packages, so this file imports only
the standard library.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress


class OrphanReaper:
    """The supervisor's side of the reaper process."""

    def __init__(self) -> None:
        """Start the process."""
        self._process = _spawn()

    def watch(self, groups: Collection[int]) -> None:
        """Set the process groups that are killed when this process ends, in place of the previous ones."""
        line = " ".join(map(str, groups)).encode() + b"\n"
        try:
            self._write(line)
        except BrokenPipeError:  # the reaper was killed
            self.close()
            self._process = _spawn()
            self._write(line)

    def close(self) -> None:
        """End the process, and with it every group that is still watched."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)


def _spawn() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (sys.executable, "-I", "-S", __file__),
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _reap() -> None:
    """Read until the supervisor is gone, then kill the groups of the last line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    last = b""
    for line in sys.stdin.buffer:
        last = line
    for group in last.split():
        with suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    _reap()
