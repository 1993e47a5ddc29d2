"""What `sluice status` reports: the state file, checked against the processes and the answers of the servers."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sluice.client import AsyncClient, RetryPolicy
from sluice.errors import SettingsError, SluiceError
from sluice.settings import load
from sluice.startup import LOOPBACK
from sluice.startup import answers as port_answers
from sluice.v1.admin_pb2 import RouterHealth
from sluice.v1.inference_pb2 import Model
from sluice.wire.connection import NatsUnreachable, shown
from supervisor.nats import wait_for_nats
from supervisor.plan import BATCHER, NATS, is_gateway, is_jobs, is_worker
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
    """Asks everything at once; takes little more than `BOUND_S` at worst."""
    state = directory.read()
    locked = directory.is_locked()
    if state is None:
        starting, absent = "a supervisor is starting", "no mesh is running; start one: sluice up"
        return MeshReport(False, starting if locked else absent, str(directory.root))
    gateway, answering = _Gateway(), frozenset[str]()
    if locked:
        credentials = operator_certificate(directory), directory.mesh_key()
        gateway, answering = await _ask(state, *credentials)
    processes = tuple(
        _process_report(process, process.name in answering) for process in state.processes
    )
    problem = _problem(state, locked, processes, gateway.models)
    return MeshReport(
        ready=problem is None,
        problem=problem,
        state_dir=str(directory.root),
        pid=state.pid if locked else None,
        address=state.address,
        ca=state.ca,
        http=state.http,
        nats_url=shown(state.nats_url),
        processes=processes,
        models=gateway.models,
        routers=gateway.routers,
    )


@dataclass(frozen=True)
class _Gateway:
    """What the gateway answers; by default nothing."""

    answers: bool = False
    models: tuple[Model, ...] = ()
    routers: tuple[RouterHealth, ...] = ()


def operator_certificate(directory: StateDir) -> Path | None:
    """Return the folder of the operator's certificate."""
    try:
        return load(directory.config).tls.mesh
    except SettingsError:
        return None


async def _ask(state: MeshState, tls: Path | None, key: str) -> tuple[_Gateway, frozenset[str]]:
    """Return the answers of one gateway and the names of the processes that answer."""
    others = {
        process.name: asking
        for process in state.processes
        if (asking := _asking(process, state.nats_url, tls)) is not None
    }
    gateways, answers = await asyncio.gather(
        asyncio.gather(*(_ask_gateway(one, state.ca, key) for one in state.address.split(","))),
        asyncio.gather(*others.values()),
    )
    gateway = next((one for one in gateways if one.answers), _Gateway())
    names = [process.name for process in state.processes if is_gateway(process.name)]
    answering = {name for name, one in zip(names, gateways, strict=False) if one.answers}
    answering |= {name for name, answered in zip(others, answers, strict=True) if answered}
    batchers = {BATCHER} if any(model.ready for model in gateway.models) else set()
    return gateway, frozenset(answering | batchers)


def _asking(process: ProcessState, nats_url: str, tls: Path | None) -> Awaitable[bool] | None:
    """Whether a process answers; None for those of which a gateway says it."""
    if process.name == NATS:
        return _in_time(wait_for_nats(nats_url, BOUND_S, tls))
    if is_worker(process.name):
        return _in_time(wait_for_triton(f"{LOOPBACK}:{process.port}", BOUND_S, tls))
    if is_jobs(process.name):
        return asyncio.to_thread(port_answers, LOOPBACK, process.port or 0, BOUND_S)
    return None


async def _ask_gateway(address: str, ca: str | None, key: str) -> _Gateway:
    try:
        async with AsyncClient(address, RetryPolicy(start_tries=1), api_key=key, ca=ca) as client:
            models, routers = await asyncio.gather(
                client.list_models(timeout_s=BOUND_S), client.router_health(timeout_s=BOUND_S)
            )
    except SluiceError:
        return _Gateway()
    return _Gateway(True, tuple(models), tuple(routers))


async def _in_time(answer: Awaitable[None]) -> bool:
    try:
        await answer
    except (TimeoutError, NatsUnreachable, SettingsError):
        return False
    return True


def _process_report(process: ProcessState, answers: bool) -> ProcessReport:
    alive = process.alive
    uptime_s = None
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
    processes: tuple[ProcessReport, ...],
    models: tuple[Model, ...],
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
