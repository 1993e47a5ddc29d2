"""Starts a supervisor that outlives the command that started it, and waits until it is ready."""

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from sluice.errors import SetupError
from supervisor import specs
from supervisor.child import exit_words, last_words
from supervisor.state import StateDir

LOG: Final = "supervisor"


def start_detached(
    state: StateDir, config: Path | None, address: str | None, bound_s: float
) -> float:
    """Starts a supervisor in a session of its own; returns the seconds its mesh took until it was ready.

    Raises:
        SetupError: it did not start; what the supervisor said, or the last lines of its log.
    """
    state.create()
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as report:
        process, log_start = _spawn(state, config, address, writing)
        os.close(writing)
        try:
            message = _read(report.fileno(), time.monotonic() + bound_s)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return _outcome(message, process, state.log(LOG), log_start)


def _spawn(
    state: StateDir, config: Path | None, address: str | None, descriptor: int
) -> tuple[subprocess.Popen[bytes], int]:
    command = [*specs.module_command("supervisor.serve", config and config.resolve())]
    command += ["--state-dir", str(state.root), "--report-fd", str(descriptor)]
    if address is not None:
        command += ["--address", address]
    with state.log(LOG).open("ab") as log:
        process = subprocess.Popen(
            command,
            env=specs.child_environment(keep_settings=True),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(descriptor,),
        )
        return process, log.tell()


def _read(descriptor: int, until: float) -> dict[str, Any] | None:
    """The supervisor's one line; None when it ended without one."""
    line = b""
    while not line.endswith(b"\n"):
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise SetupError("the supervisor did not become ready in time")
        part = os.read(descriptor, 65_536)
        if not part:
            return None
        line += part
    message: dict[str, Any] = json.loads(line)
    return message


def _outcome(
    message: dict[str, Any] | None, process: subprocess.Popen[bytes], log: Path, log_start: int
) -> float:
    if message is not None and "ready_s" in message:
        # It lives on as nobody's child; Popen must not complain that it was not waited for.
        process.returncode = 0
        return float(message["ready_s"])
    code = process.wait()
    if message is not None:
        raise SetupError(message["error"])
    said = last_words(log, log_start)
    raise SetupError(f"the supervisor ended ({exit_words(code)}); log {log}: {said}")
