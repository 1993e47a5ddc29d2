"""Runs a mesh until a signal comes: in the foreground, or in a detached supervisor that outlives the command.

``python -m supervisor.serve --state-dir DIR --report-fd N ...`` is the detached one: it writes one line to the
descriptor when it is ready or has failed, and its log to STATE/logs/supervisor.log.
"""

import argparse
import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from sluice.errors import SetupError
from sluice.settings import Settings, SettingsError, load
from sluice.startup import child_environment, module_command
from supervisor.child import describe_exit, log_tail
from supervisor.mesh import Mesh, running_mesh
from supervisor.state import StateDir

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOG: Final = "supervisor"


async def serve(settings: Settings, root: Path, on_ready: Callable[[Mesh], None]) -> None:
    """Starts a mesh, calls ``on_ready``, and keeps it up until one of `SIGNALS`; a second signal ends it at once.

    Raises:
        SetupError, SettingsError: the mesh did not start.
        KeyboardInterrupt: a signal came before it was ready.
    """
    ready = False

    async def body() -> None:
        nonlocal ready
        async with running_mesh(settings, root) as mesh:
            ready = True
            on_ready(mesh)
            await asyncio.Event().wait()

    await until_signal(body())
    if not ready:
        raise KeyboardInterrupt


async def until_signal(body: Awaitable[None]) -> None:
    """Runs ``body``; the first of `SIGNALS` cancels it, so does each later one, and then this returns."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(body)
    for number in SIGNALS:
        loop.add_signal_handler(number, running.cancel)
    try:
        await asyncio.wait([running])
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    if not running.cancelled():
        running.result()


def log_to_stderr(level: str) -> None:
    """One line per event."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )


def settings_of(config: Path | None, address: str | None) -> Settings:
    """The file's settings, with the gateway's address replaced when one is given.

    Raises:
        SettingsError: they cannot work.
    """
    # Imported here: it compiles safety rules, which most users of this module do not need.
    from gateway.config.policies import read_policies

    settings = load(config)
    read_policies(settings, config)
    if address is None:
        return settings
    gateway = settings.gateway.model_copy(update={"address": address})
    return settings.model_copy(update={"gateway": gateway})


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
        process, log_start = _spawn_detached(state, config, address, writing)
        os.close(writing)
        try:
            message = _read_report(report.fileno(), time.monotonic() + bound_s)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return _outcome(message, process, state.log(_LOG), log_start)


def _spawn_detached(
    state: StateDir, config: Path | None, address: str | None, descriptor: int
) -> tuple[subprocess.Popen[bytes], int]:
    command = [*module_command("supervisor.serve", config and config.resolve())]
    command += ["--state-dir", str(state.root), "--report-fd", str(descriptor)]
    if address is not None:
        command += ["--address", address]
    with state.log(_LOG).open("ab") as log:
        process = subprocess.Popen(
            command,
            env=child_environment(keep_settings=True),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(descriptor,),
        )
        return process, log.tell()


def _read_report(descriptor: int, until: float) -> dict[str, Any] | None:
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
        # It keeps running as an orphan; Popen must not warn that it was not waited for.
        process.returncode = 0
        return float(message["ready_s"])
    code = process.wait()
    if message is not None:
        raise SetupError(message["error"])
    said = log_tail(log, log_start)
    raise SetupError(f"the supervisor ended ({describe_exit(code)}); log {log}: {said}")


def main(arguments: list[str] | None = None) -> int:
    """The detached supervisor; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m supervisor.serve")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--address")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        settings = settings_of(options.config, options.address)
        log_to_stderr(settings.telemetry.log_level)
        on_ready = _reporter(options.report_fd)
        asyncio.run(serve(settings, options.state_dir, on_ready))
    except (SetupError, SettingsError) as error:
        _report(options.report_fd, {"error": str(error)})
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _reporter(descriptor: int) -> Callable[[Mesh], None]:
    return lambda mesh: _report(descriptor, {"ready_s": mesh.ready_s})


def _report(descriptor: int, message: dict[str, str | float]) -> None:
    try:
        os.write(descriptor, json.dumps(message).encode() + b"\n")
        os.close(descriptor)
    except OSError:
        logging.getLogger(__name__).info("the command that started this supervisor has gone")


if __name__ == "__main__":
    sys.exit(main())
