"""`sluice down`: ends what `sluice up` started."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli import options, output


def down(
    state_dir: Annotated[
        Path | None, typer.Option(help="As given to `sluice up`; default $SLUICE_STATE_DIR.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Stop the mesh; exit code 0 when nothing of it is left, also when none was running."""
    from supervisor.control import stop_mesh
    from supervisor.state import StateDir

    stopped = stop_mesh(StateDir(state_dir) if state_dir else StateDir.default())
    if as_json:
        output.write_json(asdict(stopped))
        return
    if stopped.pid is None and not stopped.leftovers:
        print("no mesh was running")
        return
    how = "stopped" if not stopped.killed and not stopped.leftovers else "killed"
    print(f"{how} in {stopped.seconds:.1f} s")
