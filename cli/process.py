"""`sluice gateway`, `batcher`, `jobs` and `worker`: one process of a mesh in the foreground, for containers."""

import os
from pathlib import Path
from typing import Annotated, Final, NoReturn

from typer import Option

TRITON_PORT: Final = 8001
"""Triton's own default."""

_NEEDED: Final = {
    "gateway": ("uvloop", "re2"),
    "batcher": ("uvloop", "tritonclient"),
    "jobs": ("uvloop",),
}
"""Of the extra that a process needs, modules that no other extra installs."""

Config = Annotated[Path, Option(help="YAML file with nats.url, shared by all processes.")]
Id = Annotated[str | None, Option("--id", help="Name of this process; default: a random one.")]


def gateway(config: Config, id: Id = None) -> None:
    """Run one gateway in the foreground until SIGTERM."""
    _become("gateway", config, id)


def batcher(config: Config, id: Id = None) -> None:
    """Run one batcher in the foreground until SIGTERM."""
    _become("batcher", config, id)


def jobs(config: Config, id: Id = None) -> None:
    """Run one process of jobs in the foreground until SIGTERM."""
    _become("jobs", config, id)


def worker(
    config: Path = Option(..., help="YAML file; its models are served."),
    host: str = Option("127.0.0.1", help="Address to listen on, without credentials."),
    port: int | None = Option(None, help="gRPC port; default triton.port, else 8001."),
    tritonserver: str | None = Option(None, help="Path or name.  [default: the wheel's]"),
) -> None:
    """Run one model worker in the foreground until SIGTERM."""
    import asyncio

    from sluice.settings import load
    from sluice.telemetry.logs import log_to_stderr
    from supervisor.mesh import running_worker
    from supervisor.serve import until_signal

    settings = load(config)
    log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)
    rpc_port = settings.triton.port if port is None else port

    async def body() -> None:
        async with running_worker(settings, host, rpc_port or TRITON_PORT, tritonserver) as address:
            print(f"ready at {address}", flush=True)
            await asyncio.Event().wait()

    asyncio.run(until_signal(body()))


def _become(module: str, config: Path, process_id: str | None) -> NoReturn:
    """Replace this process by `python -m MODULE`, so that signals and the exit code are its own."""
    from importlib.util import find_spec

    from sluice.startup import child_environment, module_command

    for needed in (module, *_NEEDED[module]):
        if find_spec(needed) is None:
            raise ModuleNotFoundError(name=needed)
    command = [*module_command(module, config), *(("--id", process_id) if process_id else ())]
    os.execve(command[0], command, child_environment(keep_settings=True))
