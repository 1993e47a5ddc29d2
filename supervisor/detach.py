"""Starts a supervisor that outlives the command.

It runs in a session of its own, writes to a pipe how far it is until its mesh is ready or has failed, and its log to
STATE/logs/supervisor.log. This module imports little: the supervisor checks and prepares everything.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sluice.errors import SetupError
from sluice.settings import load
from sluice.settings.models import convert_models
from sluice.startup import child_environment, module_command
from supervisor.child import describe_exit, log_tail
from supervisor.progress import Progress
from supervisor.state import Origin, StateDir

START_S: Final = 120.0
"""What the start of a mesh may take on top of `triton.start_s`, seconds; the supervisor itself gives up sooner."""

_LOG: Final = "supervisor"


def start_detached(
    state: StateDir, origin: Origin, on_progress: Progress = lambda _: None
) -> float:
    """Start a supervisor in a session of its own; return the seconds its mesh took until it was ready.

    `on_progress` is told each step of the start.

    Raises:
        SetupError: it did not start; what the supervisor said, or the last lines of its log.
        SettingsError: the configuration cannot work.
    """
    if state.is_locked():
        raise state.taken()
    settings = load(origin.file)
    convert_models(settings.models)  # here, where its progress is seen
    state.create()
    options = ["--state-dir", str(state.root)]
    given = {"--address": origin.address, "--http": origin.http}
    for name, value in given.items():
        options += [name, value] if value is not None else []
    options += ["--secure"] if origin.secure else []
    options += ["--metrics"] if origin.metrics else []
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as report:
        command = (*module_command("supervisor.serve", origin.file), *options)
        process, log_start = _spawn_detached(command, state.log(_LOG), writing)
        os.close(writing)
        try:
            bound_s = settings.triton.start_s + START_S
            message = _read_report(report.fileno(), time.monotonic() + bound_s, on_progress)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return _outcome(message, process, state.log(_LOG), log_start)


def _spawn_detached(
    command: Sequence[str], log: Path, descriptor: int
) -> tuple[subprocess.Popen[bytes], int]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            (*command, "--report-fd", str(descriptor)),
            env=child_environment(keep_settings=True),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(descriptor,),
        )
        return process, output.tell()


def _read_report(descriptor: int, until: float, on_progress: Progress) -> dict[str, Any] | None:
    """Return the supervisor's last message; None when it ended without one."""
    unread = b""
    while True:
        while b"\n" in unread:
            line, _, unread = unread.partition(b"\n")
            message: dict[str, Any] = json.loads(line)
            if "progress" not in message:
                return message
            on_progress(message["progress"])
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise SetupError("the supervisor did not become ready in time")
        part = os.read(descriptor, 65_536)
        if not part:
            return None
        unread += part


def _outcome(
    message: dict[str, Any] | None, process: subprocess.Popen[bytes], log: Path, log_start: int
) -> float:
    if message is not None and "ready_s" in message:
        # It keeps running as an orphan; Popen must not warn that it was not waited for.
        process.returncode = 0
        return float(message["ready_s"])
    code = process.wait()
    if message is not None:
        raise SetupError(message["error"])
    last_lines = log_tail(log, log_start)
    raise SetupError(f"the supervisor ended ({describe_exit(code)}); log {log}: {last_lines}")
