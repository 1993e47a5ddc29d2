"""`sluice worker`: the models of a configuration in an embedded Triton, on a machine of their own."""

from pathlib import Path
from typing import Annotated, Final

import typer

DEFAULT_PORT: Final = 8001
"""Triton's own default."""


def worker(
    config: Annotated[Path, typer.Option(help="YAML file; its models are served.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; there are no credentials on this port.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="gRPC port; default triton.port, else 8001.")
    ] = None,
) -> None:
    """Run a model worker in the foreground until SIGTERM, without a gateway, batcher or NATS."""
    import asyncio

    from sluice.settings import load
    from supervisor.mesh import running_worker
    from supervisor.serve import log_to_stderr, until_signal

    settings = load(config)
    log_to_stderr(settings.telemetry.log_level)
    wanted = settings.triton.port if port is None else port

    async def body() -> None:
        async with running_worker(settings, host, wanted or DEFAULT_PORT) as address:
            print(f"ready at {address}", flush=True)
            await asyncio.Event().wait()

    asyncio.run(until_signal(body()))
