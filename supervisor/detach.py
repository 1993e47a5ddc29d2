"""Starts a supervisor that outlives the command.

It runs in a session of its own, writes to a pipe how far it is until its mesh is ready or has failed, and its log to
STATE/logs/supervisor.log. This module imports little: the supervisor checks and prepares everything.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from threading import Timer
from typing import Any, Final

from sluice.errors import SetupError
from sluice.settings import load
from sluice.settings.models import convert_models
from sluice.startup import child_environment, module_command
from supervisor.child import describe_exit, log_tail
from supervisor.state import Origin, StateDir

START_S: Final = 120.0
"""What the start of a mesh may take on top of `triton.start_s`, seconds; the supervisor itself gives up sooner."""
_LOG: Final = "supervisor"


def start_detached(
    state: StateDir, origin: Origin, on_progress: Callable[[str], None] = lambda _: None
) -> float:
    """Start a supervisor in a session of its own; return the seconds its mesh took until it was ready.

    `on_progress` is told each step of the start.

    Raises:
        SetupError: a mesh runs there, or it did not start: what the supervisor said, or the end of its log.
        SettingsError: the configuration cannot work.
    """
    if state.is_locked():
        raise state.lock_error()
    settings = load(origin.file)
    convert_models(settings.models)  # here, where its progress is seen
    state.create()
    reading, writing = os.pipe()
    with os.fdopen(reading) as report, state.log(_LOG).open("ab") as log:
        log_start = log.tell()
        arguments = (str(state.root), str(writing), json.dumps(asdict(origin)))
        process = subprocess.Popen(
            (*module_command("supervisor.serve", None), *arguments),
            env=child_environment(keep_settings=True),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(writing,),
        )
        os.close(writing)
        too_late = Timer(settings.triton.start_s + START_S, process.terminate)
        too_late.start()
        message: dict[str, Any] = {"progress": ""}
        try:
            for line in report:
                message = json.loads(line)
                if "progress" not in message:
                    break
                on_progress(message["progress"])
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            too_late.cancel()
    if "ready_s" in message:
        # It keeps running as an orphan; Popen must not warn that it was not waited for.
        process.returncode = 0
        return float(message["ready_s"])
    code = process.wait()
    if "error" in message:
        raise SetupError(message["error"])
    last_lines = log_tail(state.log(_LOG), log_start)
    ended = f"the supervisor ended ({describe_exit(code)}); log {state.log(_LOG)}: {last_lines}"
    raise SetupError(ended)
