"""What the commands share that become one process of a mesh: `sluice gateway` and `sluice batcher`."""

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

Config = Annotated[
    Path, typer.Option(help="YAML file with nats.url; shared by all processes of the mesh.")
]
Id = Annotated[
    str | None, typer.Option("--id", help="Name of this process; default: a random one.")
]


def become(module: str, config: Path, process_id: str | None) -> NoReturn:
    """Replaces this process by ``python -m MODULE``, so that signals and the exit code are its own."""
    from sluice.startup import child_environment, module_command

    command = [*module_command(module, config), *(("--id", process_id) if process_id else ())]
    os.execve(command[0], command, child_environment(keep_settings=True))
