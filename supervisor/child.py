"""One run of one program, awaited without polling.

Rules:
- Each child leads a process group of its own, in our session: a terminal's Ctrl-C reaches the supervisor alone,
  which then stops its children in order.
- What is left of children when the supervisor ends is killed by `orphans`.
- The group is killed while its dead leader is not reaped yet: until then no other process can have that number.
"""

import asyncio
import logging
import os
import select
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sluice.errors import SetupError

logger = logging.getLogger(__name__)

LOG_MAX_BYTES: Final = 16 * 1024 * 1024
"""A larger log moves to NAME.log.1, in place of an older one."""
ROTATE_S: Final = 5.0
"""How often the size of a log is looked at, in seconds."""

_KILLED_BOUND_S: Final = 10.0
_LINES_READ: Final = 20
_LINES_SHOWN: Final = 5
_TAIL_CHARS: Final = 600


@dataclass(frozen=True)
class ChildSpec:
    """A program to run.

    Attributes:
        name: in logs and tables.
        argv: program and arguments.
        env: the whole environment.
        log: where output is appended; None: our own output.
        port: where it listens, for people.
        stop_s: how long it may take to end after SIGTERM, seconds.
        stage: those of a higher one end first, those of one together.
        nice: above 0, it gives way to the other processes where they want the same core (nice(2), sched(7)).
        page: host and port of its metrics for Prometheus, if it has any.
        folder: its working directory; None: ours.
        parts_of: gives those of its own children, by its pid, that end on SIGTERM by themselves. They are ended in its
            place, and it is killed once they have.
        linger_s: how long it is left alone between both, seconds.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    log: Path | None = None
    port: int | None = None
    stop_s: float = 10.0
    stage: int = 0
    nice: int = 0
    page: str | None = None
    folder: Path | None = None
    parts_of: Callable[[int], Collection[int]] = lambda _: ()
    linger_s: float = 0.0


class Child:
    """A running process.

    Attributes:
        pid: also the number of its process group.
        started_unix_ms: when it started, milliseconds since the Unix epoch.
        log_start: how long the log was when it started, bytes.
        ending: whether it was asked to end.
        ended_by_parts: whether it was killed after its parts had ended, or had not within their bound.
        exited: done with the exit code (negative: the signal) when it has ended and is reaped.
    """

    def __init__(self, spec: ChildSpec) -> None:
        """Start `spec`. Needs a running event loop; raises OSError if no process can be started."""
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self.ending = self.ended_by_parts = False
        self.exited: asyncio.Future[int] = self._loop.create_future()
        if spec.log is not None and spec.log.exists():
            # `keep_log_small` never sees the log of a process that ends at once, again and again.
            _rotate(spec.log, LOG_MAX_BYTES)
        with nullcontext() if spec.log is None else spec.log.open("ab") as log:
            self.log_start = log.tell() if log is not None else 0
            self._process = subprocess.Popen(
                spec.argv,
                env=dict(spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=spec.folder,
                umask=0o077,  # files of a mesh hold prompts and keys
                # Not a session of its own: where the kernel shares cores by session (sched(7), autogroups), it would
                # count priorities of threads inside each session alone.
                process_group=0,
            )
        self.pid = self._process.pid
        if spec.nice:
            os.setpriority(os.PRIO_PROCESS, self.pid, spec.nice)
        self.started_unix_ms = time.time_ns() // 1_000_000
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def alive(self) -> bool:
        """Whether it has not been seen to end."""
        return self._process.returncode is None

    def send(self, sent: signal.Signals) -> None:
        """Send a signal to the process itself; after SIGKILL its group follows when its end is seen."""
        if self.alive:
            self._process.send_signal(sent)

    async def end(self, bound_s: float) -> int:
        """Send SIGTERM, and SIGKILL when it has not ended after `bound_s` seconds; return the exit code.

        If it has parts (`ChildSpec.parts_of`), they get the SIGTERM, and it is always killed after them.
        """
        self.ending = True
        if self.alive and (parts := self._spec.parts_of(self.pid)):
            await asyncio.to_thread(_end_all, parts, bound_s)
            await asyncio.wait([self.exited], timeout=self._spec.linger_s)
            self.ended_by_parts = self.alive
            self.send(signal.SIGKILL)
            return await self.exited
        self.send(signal.SIGTERM)
        try:
            return await asyncio.wait_for(asyncio.shield(self.exited), bound_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
            return await self.exited

    def kill_now(self) -> None:
        """Kill it with its group and reap it without the loop's help: the last resort of a shutdown."""
        if not self.alive:
            return
        self._process.kill()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._reap()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with suppress(ProcessLookupError):  # the leader was alone
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        if not self.exited.done():
            self.exited.set_result(code)


def has_ended(pid: int, bound_s: float) -> bool:
    """Wait until a process has ended, be it reaped or not; it need not be our child. Return whether it was in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], bound_s)[0])
    finally:
        os.close(descriptor)


def expect_end(pid: int, name: str) -> None:
    """Wait for the end of a killed process; raise SetupError if it does not end."""
    if not has_ended(pid, _KILLED_BOUND_S):
        raise SetupError(f"{name} (pid {pid}) does not end, not even by SIGKILL")


def _end_all(pids: Collection[int], bound_s: float) -> None:
    """End processes that are not our children, and return when they have ended or the time is over."""
    until = time.monotonic() + bound_s
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in pids:
        has_ended(pid, max(0.0, until - time.monotonic()))


async def keep_log_small(
    path: Path, max_bytes: int = LOG_MAX_BYTES, every_s: float = ROTATE_S
) -> None:
    """Move what is in a log aside whenever it is larger than `max_bytes`, until it is cancelled."""
    while True:
        await asyncio.sleep(every_s)
        try:
            _rotate(path, max_bytes)
        except OSError as error:
            logger.warning("rotation of %s failed: %s", path, error.strerror)


def _rotate(path: Path, max_bytes: int) -> None:
    """Move what is in a large log to NAME.log.1, also while a process writes to it. Raises OSError.

    The process appends to the same file, so the file is copied and emptied. A line that comes between is lost.
    """
    if path.stat().st_size > max_bytes:
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)


def describe_exit(code: int) -> str:
    """Return an exit code as text."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def log_tail(path: Path, start: int = 0) -> str:
    """Return the end of a log as one line: from the last line with an error, else the last lines.

    `start` is the length of the log before it began, bytes.
    """
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    # A log that is shorter than it was has been rotated.
    text = content[start if start <= len(content) else 0 :].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()][-_LINES_READ:]
    errors = [index for index, line in enumerate(lines) if "error" in line.lower()]
    begin = errors[-1] if errors else len(lines) - _LINES_SHOWN
    words = " | ".join(lines[max(begin, 0) :][:_LINES_SHOWN])
    return textwrap.shorten(words, _TAIL_CHARS, placeholder=" ...") or "nothing written"
