"""What `sluice status` reports: the state file, checked against the processes and the answers of the servers."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sluice.client import AsyncClient, RetryPolicy
from sluice.errors import SettingsError, SluiceError
from sluice.settings import load
from sluice.startup import LOOPBACK
from sluice.startup import answers as port_answers
from sluice.v1.admin_pb2 import RouterHealth
from sluice.v1.inference_pb2 import Model
from sluice.wire.connection import NatsUnreachable, redact_url
from supervisor.nats import wait_for_nats
from supervisor.plan import BATCHER, GATEWAY, JOBS, NATS, is_worker, kind_of
from supervisor.state import MeshState, ProcessState, StateDir
from supervisor.triton import wait_for_triton

BOUND_S: Final = 2.0
"""How long each server may take to answer, seconds."""


@dataclass(frozen=True)
class ProcessReport:
    """One process; `ready`: it answers, and for the batcher: it has a live worker."""

    name: str
    pid: int | None
    alive: bool
    ready: bool
    uptime_s: float | None
    restarts: int
    port: int | None
    log: str | None
    page: str | None


@dataclass(frozen=True)
class MeshReport:
    """A mesh, or its absence.

    Attributes:
        ready: whether everything is; the exit code follows it.
        problem: one line for people when it is not.
        pid: of the supervisor.
        routers: the learned routers in use.
    """

    ready: bool
    problem: str | None
    state_dir: str
    pid: int | None = None
    address: str | None = None
    http: str | None = None
    ca: str | None = None
    nats_url: str | None = None
    processes: tuple[ProcessReport, ...] = ()
    models: tuple[Model, ...] = ()
    routers: tuple[RouterHealth, ...] = ()


async def report_of(directory: StateDir) -> MeshReport:
    """Report on the mesh of a state directory: ask all processes at once, for little more than `BOUND_S` at worst."""
    state, locked = directory.read(), directory.is_locked()
    if state is None:
        starting, absent = "a supervisor is starting", "no mesh is running; start one: sluice up"
        return MeshReport(False, starting if locked else absent, str(directory.root))
    gateway = _Gateway()
    answering = await _answering(state, directory, gateway) if locked else set[str]()
    if any(model.ready for model in gateway.models):
        answering.add(BATCHER)
    processes = tuple(_process_report(one, one.name in answering) for one in state.processes)
    problem = _problem(state, locked, processes, gateway.models)
    return MeshReport(
        ready=problem is None,
        problem=problem,
        state_dir=str(directory.root),
        pid=state.pid if locked else None,
        address=state.address,
        ca=state.ca,
        http=state.http,
        nats_url=redact_url(state.nats_url),
        processes=processes,
        models=tuple(gateway.models),
        routers=tuple(gateway.routers),
    )


@dataclass
class _Gateway:
    """What a gateway answers."""

    models: list[Model] = field(default_factory=list)
    routers: list[RouterHealth] = field(default_factory=list)

    async def ask(self, address: str, ca: str | None, key: str) -> None:
        async with AsyncClient(address, RetryPolicy(start_tries=1), api_key=key, ca=ca) as client:
            self.models, self.routers = await asyncio.gather(
                client.list_models(timeout_s=BOUND_S), client.router_health(timeout_s=BOUND_S)
            )


def operator_certificate(directory: StateDir) -> Path | None:
    """Return the folder of the operator's certificate; None: no encryption, or no configuration that can be read."""
    try:
        return load(directory.config).tls.mesh
    except SettingsError:
        return None


async def _answering(state: MeshState, directory: StateDir, gateway: _Gateway) -> set[str]:
    """Return the names of the processes that answer, without the batcher; `gateway` takes what they say."""
    tls, key = operator_certificate(directory), directory.mesh_key()
    addresses, checks = iter(state.address.split(",")), dict[str, Awaitable[object]]()
    for process in state.processes:
        if process.name == NATS:
            checks[process.name] = wait_for_nats(state.nats_url, BOUND_S, tls)
        elif is_worker(process.name):
            checks[process.name] = wait_for_triton(f"{LOOPBACK}:{process.port}", BOUND_S, tls)
        elif kind_of(process.name) == JOBS:
            answering = asyncio.to_thread(port_answers, LOOPBACK, process.port or 0, BOUND_S)
            checks[process.name] = answering
        elif kind_of(process.name) == GATEWAY:
            checks[process.name] = gateway.ask(next(addresses), state.ca, key)
    answers = await asyncio.gather(*map(_answers, checks.values()))
    return {name for name, answer in zip(checks, answers, strict=True) if answer}


async def _answers(check: Awaitable[object]) -> bool:
    """Return whether a process answers."""
    try:
        return await check is not False
    except (TimeoutError, NatsUnreachable, SluiceError, SettingsError):
        return False


def _process_report(process: ProcessState, answers: bool) -> ProcessReport:
    alive, uptime_s = process.alive, None
    if alive and process.started_unix_ms is not None:
        uptime_s = max(0.0, time.time() - process.started_unix_ms / 1000)
    return ProcessReport(
        name=process.name,
        pid=process.pid if alive else None,
        alive=alive,
        ready=alive and answers,
        uptime_s=uptime_s,
        restarts=process.restarts,
        port=process.port,
        log=process.log,
        page=process.page,
    )


def _problem(
    state: MeshState,
    locked: bool,
    processes: Sequence[ProcessReport],
    models: Sequence[Model],
) -> str | None:
    if not locked:
        return (
            f"the supervisor (pid {state.pid}) is gone and did not stop its mesh; "
            "start it again: sluice up"
        )
    if not state.ready:
        return "the mesh is starting or stopping"
    waiting = [process.name for process in processes if not process.ready]
    waiting += [f"model {model.name}" for model in models if not model.ready]
    return f"not ready: {', '.join(waiting)}" if waiting else None
