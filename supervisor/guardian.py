"""A process of its own that outlives a killed supervisor by a moment, and takes what it left along.

The kernel kills the direct children of a supervisor with it (see `launch`), but not their children: a Python process of
Triton's can outlive its server for minutes. The guardian reads one line for every change, the process groups that live
now, and kills those of the last line when there is no more to read, because then the supervisor is gone.

``python -I -S guardian.py`` is that process: only the standard library, and nothing of Sluice.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable


class Guardian:
    """The supervisor's end."""

    def __init__(self) -> None:
        """Starts the process."""
        self._process = _spawn()

    def guard(self, groups: Collection[int]) -> None:
        """From now on ``groups``, and no others, end with us."""
        line = " ".join(map(str, groups)).encode() + b"\n"
        try:
            self._write(line)
        except BrokenPipeError:
            # Somebody killed it; the next one knows as much.
            self.close()
            self._process = _spawn()
            self._write(line)

    def close(self) -> None:
        """Ends the process; what it guards ends with it, so nothing should be left then."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)


def _spawn() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        (sys.executable, "-I", "-S", __file__),
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(lines: Iterable[bytes]) -> None:
    """Reads until the supervisor is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    last = b""
    for line in lines:
        last = line
    for group in last.split():
        try:
            os.killpg(int(group), signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main(sys.stdin.buffer)
