"""The NATS of a mesh for commands of its operator, who may read its configuration or its state folder."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.failure import CommandFailed

if TYPE_CHECKING:
    from nats.aio.client import Client

    from sluice.settings import Settings

Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML file of the mesh; unset: SLUICE_NATS__URL, or the mesh of the state folder."
    ),
]


def settings_of(config: Path | None, state_dir: Path | None) -> "Settings":
    """The settings of the mesh: of ``config``, of the environment where that names its NATS, or of the state folder.

    Raises:
        CommandFailed: no mesh has been started with that state folder.
        SettingsError: the file cannot be used.
    """
    from sluice.settings import load

    if config is None and os.environ.get("SLUICE_NATS__URL"):
        return load()
    if config is None:
        from supervisor.state import StateDir

        state = StateDir.of(state_dir)
        if not state.config.exists():
            raise CommandFailed(
                "NO_MESH", f"{state.root} has no mesh; start it with sluice up, or name --config"
            )
        config = state.config
    settings = load(config)
    if settings.nats.url is None:
        raise CommandFailed(
            "NO_MESH", f"{config}: nats.url: is not set, so it does not say which mesh"
        )
    return settings


@asynccontextmanager
async def connected(settings: "Settings") -> AsyncIterator["Client"]:
    """A connection to the NATS of ``settings``; raises NatsUnreachable."""
    from sluice.wire.connection import connect, disconnect
    from sluice.wire.permissions import OPERATOR

    client = await connect(settings.nats, OPERATOR, OPERATOR, lambda: None, settings.tls.mesh)
    try:
        yield client
    finally:
        await disconnect(client)
