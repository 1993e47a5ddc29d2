"""Runs a mesh until a signal comes: in the foreground, or in a detached supervisor that outlives the command.

`python -m supervisor.serve --state-dir DIR --report-fd N ...` is the detached one, see `supervisor.detach`.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from sluice.defaults import DEFAULT_HTTP_ADDRESS
from sluice.errors import SetupError
from sluice.settings import Settings, SettingsError
from sluice.settings.models import convert_models
from sluice.startup import LOOPBACK
from sluice.telemetry.environment import clean
from sluice.telemetry.logs import log_to_stderr
from supervisor.check import check
from supervisor.mesh import Mesh, running_mesh
from supervisor.plan import changed
from supervisor.progress import Progress
from supervisor.state import DEFAULTS, Origin

HTTP_OFF: Final = "off"
PAGES: Final = ("gateway", "batcher", "jobs", "triton")
"""Keys of telemetry.prometheus whose pages Prometheus reads; that of NATS is JSON."""
FREE_PAGE: Final = f"{LOOPBACK}:0"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def serve(
    settings: Settings,
    root: Path,
    on_ready: Callable[[Mesh], None],
    on_progress: Progress = lambda _: None,
    origin: Origin = DEFAULTS,
) -> None:
    """Start a mesh, call `on_ready`, and keep it up until one of `SIGNALS`; a second signal ends it at once.

    `on_progress` is told each step of the start, and when the stop begins.

    Raises:
        SetupError, SettingsError: the mesh did not start.
        KeyboardInterrupt: a signal came before it was ready.
    """
    clean()  # once for all processes, which inherit the variables
    ready = False

    async def body() -> None:
        nonlocal ready
        async with running_mesh(settings, root, on_progress, origin) as mesh:
            ready = True
            on_ready(mesh)
            try:
                await asyncio.Event().wait()
            finally:
                on_progress("stopping: requests that run may end; a second Ctrl-C ends them")

    await until_signal(body())
    if not ready:
        raise KeyboardInterrupt


async def until_signal(body: Awaitable[None]) -> None:
    """Run `body` until it ends or one of `SIGNALS` cancels it, as each later one does; SIGHUP not under nohup."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(body)
    is_immune = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = [one for one in SIGNALS if one is not signal.SIGHUP or not is_immune]
    for number in handled:
        loop.add_signal_handler(number, running.cancel)
    try:
        await asyncio.wait([running])
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
    if not running.cancelled():
        running.result()


def settings_of(origin: Origin, http: str | None = DEFAULT_HTTP_ADDRESS) -> Settings:
    """Return the settings of the file, with what `sluice up` was given beside it in place of the file's.

    Without a word about it HTTP is served at `http`.

    Raises:
        SettingsError: they cannot work.
    """
    settings = check(origin.file)
    convert_models(settings.models)
    if origin.secure:
        settings = changed(settings, tls={"embedded": True})
    if origin.metrics:
        given = {str(name): page for name, page in settings.telemetry.prometheus.items()}
        pages = given | {name: given.get(name) or FREE_PAGE for name in PAGES}
        settings = changed(settings, telemetry={"prometheus": pages})
    if origin.address is not None:
        settings = changed(settings, gateway={"address": origin.address})
    if origin.http is not None or "address" in settings.http.model_fields_set:
        http = origin.http
    if http is not None:
        settings = changed(settings, http={"address": None if http == HTTP_OFF else http})
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Run the detached supervisor and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m supervisor.serve")
    parser.add_argument("--config")
    parser.add_argument("--address")
    parser.add_argument("--http")
    parser.add_argument("--secure", action="store_true")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        origin = Origin(
            options.config, options.address, options.http, options.secure, options.metrics
        )
        settings = settings_of(origin)
        log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)
        reporter = _Reporter(options.report_fd)
        asyncio.run(serve(settings, options.state_dir, reporter.ready, reporter.progress, origin))
    except (SetupError, SettingsError) as error:
        _Reporter(options.report_fd).end({"error": str(error)})
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class _Reporter:
    """Tells the command that started this supervisor, a JSON object a line, until the mesh is ready or has failed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_open = True

    def progress(self, step: str) -> None:
        """Report a step of the start."""
        self._write({"progress": step})

    def ready(self, mesh: Mesh) -> None:
        """Report that the mesh is ready."""
        self.end({"ready_s": mesh.ready_s})

    def end(self, message: dict[str, str | float]) -> None:
        """Send the last message."""
        self._write(message)
        if self._is_open:
            os.close(self._descriptor)
        self._is_open = False

    def _write(self, message: dict[str, str | float]) -> None:
        if not self._is_open:
            return
        try:
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")
        except OSError:
            self._is_open = False
            logging.getLogger(__name__).info("the command that started this supervisor has gone")


if __name__ == "__main__":
    sys.exit(main())
