"""Runs a mesh until a signal comes: in the foreground, or in a detached supervisor that outlives the command.

`python -m supervisor.serve STATE_DIR DESCRIPTOR ORIGIN` is the detached one, see `supervisor.detach`.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from sluice.defaults import DEFAULT_HTTP_ADDRESS
from sluice.errors import SetupError
from sluice.settings import Settings, SettingsError
from sluice.settings.mesh import Page
from sluice.settings.models import convert_models
from sluice.startup import LOOPBACK
from sluice.telemetry.environment import clean
from sluice.telemetry.logs import log_to_stderr
from supervisor.check import check
from supervisor.mesh import Mesh, Progress, running_mesh
from supervisor.plan import changed, with_pages
from supervisor.state import DEFAULTS, Origin

PAGES: Final[tuple[Page, ...]] = ("gateway", "batcher", "jobs", "triton")
"""Keys of telemetry.prometheus whose pages Prometheus reads; that of NATS is JSON."""
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
        SetupError, SettingsError, TimeoutError, NatsUnreachable: the mesh did not start.
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

    HTTP is served at `http` if neither says where. GGUF models are converted first, which may take a while.

    Raises:
        SettingsError: they cannot work.
    """
    settings = check(origin.file)
    convert_models(settings.models)
    if origin.secure:
        settings = changed(settings, tls={"embedded": True})
    if origin.metrics:
        pages = settings.telemetry.prometheus
        settings = with_pages(
            settings, **{name: pages.get(name) or f"{LOOPBACK}:0" for name in PAGES}
        )
    if origin.address is not None:
        settings = changed(settings, gateway={"address": origin.address})
    if origin.http is not None or "address" in settings.http.model_fields_set:
        http = origin.http
    if http is not None:
        settings = changed(settings, http={"address": None if http == "off" else http})
    return settings


def main(root: str, descriptor: str, origin_json: str) -> int:
    """Run the detached supervisor and return its exit code.

    It tells the command that started it, a JSON object a line, how far it is until the mesh is ready or has failed.
    """
    report = open(int(descriptor), "wb", buffering=0)  # noqa: SIM115  open as long as the process

    def send(**message: str | float) -> None:
        with suppress(OSError):  # that command has gone
            report.write(json.dumps(message).encode() + b"\n")

    try:
        origin = Origin(**json.loads(origin_json))
        settings = settings_of(origin)
        log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)
        asyncio.run(
            serve(
                settings,
                Path(root),
                lambda mesh: send(ready_s=mesh.ready_s),
                lambda step: send(progress=step),
                origin,
            )
        )
    except (SetupError, SettingsError) as error:
        send(error=str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
