"""`sluice status`: what runs, and whether it can answer."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli import failure, options, output
from sluice.cli.drift import line_of


def status(
    state_dir: Annotated[
        Path | None, typer.Option(help="As given to `sluice up`; default $SLUICE_STATE_DIR.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show processes and models; exit code 0 only when all are ready."""
    import asyncio

    from supervisor.state import StateDir
    from supervisor.status import report_of

    directory = StateDir(state_dir) if state_dir else StateDir.default()
    report = asyncio.run(report_of(directory))
    if not as_json:
        _show(report)
    if report.problem:
        raise failure.CommandFailed("NOT_READY", report.problem, asdict(report))
    if as_json:
        output.write_json(asdict(report))


def _show(report: Any) -> None:
    """Prints a `MeshReport`."""
    if report.processes:
        header = ("process", "pid", "alive", "ready", "uptime", "restarts", "reloads", "port")
        output.write_table(header, [_process_row(process) for process in report.processes])
    if report.models:
        columns = ("model", "tier", "ready", "slots", "running", "queued")
        print()
        output.write_table(columns, [_model_row(model) for model in report.models])
    for router in report.routers:
        print(line_of(router))
    if report.ready:
        print(f"ready at {report.address}, supervisor {report.pid}")


def _process_row(process: Any) -> tuple[str, ...]:
    uptime = "-" if process.uptime_s is None else f"{process.uptime_s:.0f} s"
    alive, ready = _word(process.alive), _word(process.ready)
    counts = (str(process.restarts), str(process.reloads))
    return (
        process.name,
        str(process.pid or "-"),
        alive,
        ready,
        uptime,
        *counts,
        str(process.port or "-"),
    )


def _model_row(model: Any) -> tuple[str, ...]:
    counts = (str(model.slots), str(model.running), str(model.queued))
    return (model.name, model.tier, _word(model.ready), *counts)


def _word(value: bool) -> str:
    return "yes" if value else "no"
