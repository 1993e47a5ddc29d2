"""`sluice up`: a whole mesh on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli import options, output


def up(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; without one the shipped tiers are served.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of the gateway; port 0 takes a free one.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Logs, state and tasks; default $SLUICE_STATE_DIR.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is ready.")] = False,
    as_json: options.Json = False,
) -> None:
    """Start nats-server, tritonserver, batcher and gateway, and keep them up until Ctrl-C."""
    import asyncio

    from supervisor.serve import log_to_stderr, serve, settings_of
    from supervisor.state import StateDir

    state = StateDir(state_dir) if state_dir else StateDir.default()
    settings = settings_of(config, address)
    if detach:
        _detach(state, settings, config, address, as_json)
        return
    log_to_stderr(settings.telemetry.log_level)
    asyncio.run(serve(settings, state.root, lambda mesh: _show(mesh.state, mesh.ready_s, as_json)))


def _detach(
    state: Any, settings: Any, config: Path | None, address: str | None, as_json: bool
) -> None:
    from supervisor.mesh import GATEWAY_START_S
    from supervisor.plan import make_plan
    from supervisor.serve import start_detached

    if state.is_locked():
        raise state.taken()
    make_plan(settings, state)  # what can be found at the door is said before anything is started
    bound_s = settings.triton.start_s + 2 * GATEWAY_START_S
    ready_s = start_detached(state, config, address, bound_s)
    _show(state.read(), ready_s, as_json)


def _show(state: Any, ready_s: float, as_json: bool) -> None:
    """Prints a `MeshState`."""
    if as_json:
        output.write_json({"ready_s": round(ready_s, 3), **asdict(state)})
        return
    rows = [(p.name, str(p.pid), str(p.port or "-"), p.log) for p in state.processes]
    output.write_table(("process", "pid", "port", "log"), rows)
    print(f"ready in {ready_s:.1f} s at {state.address}", flush=True)
