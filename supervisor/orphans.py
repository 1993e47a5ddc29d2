"""Nothing that a supervisor started outlives it, however it ends. Two small programs see to that.

`python -I -S orphans.py exec PARENT_PID PROGRAM ARGUMENT...` sets the kernel's parent-death signal and becomes the
program. The signal is set after the fork and survives the exec. A program of its own keeps the supervisor free of code
between fork and exec, which is unsafe in a process with threads; it costs about 20 ms a start.

`python -I -S orphans.py reap` kills what the signal does not reach: it goes to direct children only, and a Python
process of Triton's can outlive its server for minutes. The reaper reads one line for every change, the process groups
that live now. At the end of its input the supervisor is gone, and it kills the groups of the last line.

Both run without site-packages, so this file imports only the standard library, and what takes long to load only where
it is used.
"""

import os
import signal
import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import subprocess

_PR_SET_PDEATHSIG: Final = 1
_PROGRAM: Final = (sys.executable, "-I", "-S", __file__)


def dying_with_us(argv: Collection[str]) -> tuple[str, ...]:
    """Return the command that runs `argv` until the thread that started it ends."""
    return (*_PROGRAM, "exec", str(os.getpid()), *argv)


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


def _spawn() -> "subprocess.Popen[bytes]":
    import subprocess

    return subprocess.Popen(
        (*_PROGRAM, "reap"),
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _exec(arguments: list[str]) -> int:
    """Replace this process by the program; return only if that fails."""
    import ctypes

    parent, argv = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1  # it died before the signal was set
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _reap(lines: Iterable[bytes]) -> int:
    """Read until the supervisor is gone, then kill the groups of the last line."""
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
    return 0


if __name__ == "__main__":
    sys.exit(_exec(sys.argv[2:]) if sys.argv[1] == "exec" else _reap(sys.stdin.buffer))
