"""`sluice batcher`: one batcher in the foreground, for containers."""

import os
from pathlib import Path
from typing import Annotated

import typer


def batcher(
    config: Annotated[
        Path, typer.Option(help="YAML file with nats.url; shared by all processes of the mesh.")
    ],
    id: Annotated[
        str | None, typer.Option("--id", help="Name of this process; default: a random one.")
    ] = None,
) -> None:
    """Run one batcher in the foreground until SIGTERM."""
    from sluice.processes.specs import child_environment, module_command

    command = [*module_command("batcher", config), *(("--id", id) if id else ())]
    os.execve(command[0], command, child_environment(keep_settings=True))
