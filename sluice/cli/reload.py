"""`sluice reload`: another configuration for the mesh that runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli import options, output


def reload(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file; without one the lists of words are read again."),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="As given to `sluice up`; default $SLUICE_STATE_DIR.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Change the safety policies of the running mesh; requests in flight keep those that they began with.

    Exit code 0 when every process that reads them has taken them. What cannot change while running is refused by its
    key, and then nothing changes.
    """
    from supervisor.control import reload_mesh
    from supervisor.state import StateDir

    state = StateDir(state_dir) if state_dir else StateDir.default()
    done = reload_mesh(state, config.resolve() if config else None)
    if as_json:
        output.write_json(asdict(done))
        return
    what = "another configuration" if done.changed else "the same configuration, read again"
    print(f"{', '.join(done.processes)}: {what}, in {done.seconds:.1f} s")
