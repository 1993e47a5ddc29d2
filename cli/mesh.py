"""`sluice up`, `down`, `reload`, `status`, `models` and `drift`: a mesh on this machine, and what any mesh serves."""

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from cli import options, output
from cli.commands import Group
from sluice.client.channel import ADDRESS_VARIABLE, CA_VARIABLE
from sluice.local_mesh import STATE_DIR_VARIABLE, state_root
from sluice.v1.admin_pb2 import RouterHealth
from sluice.v1.inference_pb2 import Model

if TYPE_CHECKING:
    from supervisor.mesh import Mesh
    from supervisor.state import MeshState, StateDir
    from supervisor.status import MeshReport


def drift(client: options.OperatorClient) -> None:
    """Show whether the learned routers still fit the traffic.

    It compares inputs and accuracy with those of the training, on the traffic of all gateways.
    """
    routers = [*map(health_object, client.router_health())]
    empty = "no learned router is in use"
    output.show({"routers": routers}, (lambda: _write_routers(routers)) if routers else empty)


def health_object(router: RouterHealth) -> dict[str, Any]:
    """Return a router as JSON."""
    described = output.message_object(router)
    if described["accuracy"]["bias"] is None:
        described["accuracy"]["brier"] = None
    return described


def _write_routers(routers: Iterable[Mapping[str, Any]]) -> None:
    """Print what fits and what has drifted, with the figures that say so."""
    rows = []
    for router in routers:
        inputs, accuracy = router["inputs"], router["accuracy"]
        fits = (inputs["state"], inputs["stability_index"], inputs["limit"], inputs["rows"])
        right = (accuracy["state"], accuracy["bias"], accuracy["half_width"], accuracy["rows"])
        rows.append((router["policy"], router["head"], router["version"], *fits, *right))
    headers = ("router", "head", "version", "inputs", "PSI", "limit", "requests")
    output.write_table((*headers, "accuracy", "bias", "+-", "outcomes"), rows, keys=2)


def _state_of(state_dir: options.StateDir = None) -> "StateDir":
    from supervisor.state import StateDir

    return StateDir(state_dir)


OfMesh = Annotated["StateDir", Group(_state_of)]
"""The state directory of a mesh on this machine."""


def up(
    *,
    config: Path | None = Option(None, help="YAML file; without one the shipped tiers are served."),
    address: str | None = Option(None, help="HOST:PORT of the gateway; port 0 takes a free one."),
    http: str | None = Option(
        None, help="HOST:PORT of OpenAI's API, or off.  [default: 127.0.0.1:8000]"
    ),
    state: OfMesh,
    detach: bool = Option(False, "--detach", help="Return when the mesh is ready."),
    secure: bool = Option(
        False, "--secure", help="Encrypt every connection with own certificates."
    ),
    metrics: bool = Option(False, "--metrics", help="Serve metrics for Prometheus on free ports."),
) -> None:
    """Start a mesh on this machine, and run it until Ctrl-C.

    It consists of nats-server, a tritonserver for each worker, batcher, gateway and jobs.
    """
    from sluice.settings.model_cache import chat_problem
    from supervisor.state import Origin

    if config is None and (problem := chat_problem()):
        print(f"the general model is not served: {problem}", file=sys.stderr, flush=True)
    origin = Origin(
        None if config is None else str(config.absolute()), address, http, secure, metrics
    )
    if detach:
        from supervisor.detach import start_detached

        ready_s = start_detached(state, origin, output.progress)
        mesh = state.read()
        assert mesh is not None, "the detached supervisor has written it"
        _write_started(mesh, ready_s, state.root, "stop it with: sluice down")
        return
    import asyncio

    from sluice.telemetry.logs import log_to_stderr
    from supervisor.serve import serve, settings_of

    settings = settings_of(origin)
    log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)

    def on_ready(mesh: "Mesh") -> None:
        _write_started(mesh.state, mesh.ready_s, state.root, "Ctrl-C stops it")

    asyncio.run(serve(settings, state.root, on_ready, output.progress, origin))


def down(state: OfMesh) -> None:
    """Stop the mesh of this machine.

    Exits with 0 when the mesh is fully stopped, or was not running.
    """
    from supervisor.control import stop_mesh

    def on_wait(names: Sequence[str], left_s: float) -> None:
        output.progress(f"waiting for {', '.join(names)} to end (at most {left_s:.0f} s)")

    stopped = stop_mesh(state, on_wait)
    how = "killed" if stopped.killed or stopped.leftovers else "stopped"
    text = f"{how} in {stopped.seconds:.1f} s"
    if stopped.pid is None and not stopped.leftovers:
        text = "no mesh was running"
    output.show(asdict(stopped), text)


def reload(
    *,
    config: Path | None = Option(None, help="YAML file.  [default: that of `sluice up`]"),
    state: OfMesh,
) -> None:
    """Change models, policies and limits of the running mesh.

    Word lists and model folders are read again in any case.
    Requests in flight keep what they began with. A model that is added or replaced is loaded beside those that run.
    Exit code 0 when every process has taken the change. What cannot change while running is refused by its key, and
    then nothing changes.
    """
    from supervisor.control import reload_mesh

    done = reload_mesh(state, config.resolve() if config else None)
    what = "another configuration" if done.changed else "the same configuration, read again"
    lines = [f"{', '.join(done.processes)}: {what}, in {done.seconds:.1f} s"]
    lines += [f"model {name}: {word}" for name, word in done.models.items()]
    output.show(asdict(done), "\n".join(lines))


def status(state: OfMesh) -> None:
    """Show the processes and models of the mesh.

    The exit code is 0 only when all of them are ready.
    """
    import asyncio
    import logging

    from supervisor.status import report_of

    # asyncio warns of each TLS connection that a server closes; the report says what does not answer.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    report = asyncio.run(report_of(state))
    described = {
        **asdict(report),
        "models": [*map(output.message_object, report.models)],
        "routers": [*map(health_object, report.routers)],
    }
    failed = ("NOT_READY", report.problem) if report.problem else None
    output.show(described, lambda: _write_report(report), failed)


def models(client: options.OperatorClient) -> None:
    """List the models, and whether each can answer now."""
    listed = client.list_models()
    described = {"models": [*map(output.message_object, listed)]}
    output.show(described, lambda: _write_models(listed))


def _write_started(state: "MeshState", ready_s: float, root: Path, stop: str) -> None:
    def write() -> None:
        rows = [(p.name, p.pid, p.port or None, p.log or None) for p in state.processes]
        output.write_table(("process", "pid", "port", "log"), rows)
        for process in state.processes:
            if process.page is not None:
                print(f"metrics of {process.name}: http://{process.page}/metrics")
        if state.ca is not None:
            print(f"callers need: export {CA_VARIABLE}={state.ca}")
        print(f"ready in {ready_s:.1f} s at {state.address}{_http(state)}", flush=True)
        how, ends = "commands find it by themselves", stop
        if root != state_root():
            named = shlex.quote(str(root))
            how = f"commands find it with: export {STATE_DIR_VARIABLE}={named}"
            ends = stop.replace("sluice down", f"sluice down --state-dir {named}")
        output.note(f"{how}; other programs: export {ADDRESS_VARIABLE}={state.address}")
        output.note(ends)

    output.show({"ready_s": round(ready_s, 3), **asdict(state)}, write)


def _write_report(report: "MeshReport") -> None:
    if report.processes:
        columns = ["name", "pid", "alive", "ready", "uptime_s", "restarts", "port", "page"]
        if not any(process.page for process in report.processes):
            columns.remove("page")
        rows = [[getattr(process, name) for name in columns] for process in report.processes]
        output.write_table(columns, rows, keys=1)
    if report.models:
        print()
        _write_models(report.models)
    if report.routers:
        print()
        _write_routers(map(health_object, report.routers))
    if report.ready:
        print(f"ready at {report.address}{_http(report)}, supervisor {report.pid}")


def _write_models(listed: Iterable[Model]) -> None:
    headers = ("name", "tier", "ready", "context_tokens", "slots", "running", "queued")
    rows = ([getattr(model, name) for name in headers] for model in listed)
    output.write_table(headers, rows)


def _http(mesh: "MeshState | MeshReport") -> str:
    scheme = "http" if mesh.ca is None else "https"
    return "".join(f", {scheme}://{one}/v1" for one in (mesh.http or "").split(",") if one)
