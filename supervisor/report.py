"""What `sluice status` says: the state file, held against the processes and asked of the servers themselves."""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import grpc

from sluice.client.lookups import RouterHealth, routers_of
from sluice.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from supervisor import specs
from supervisor.nats import wait_for_nats
from supervisor.readiness import channel, reachable
from supervisor.state import MeshState, ProcessState, StateDir
from supervisor.triton import wait_for_triton

BOUND_S: Final = 2.0
"""How long each server may take to answer, seconds."""


@dataclass(frozen=True)
class ProcessReport:
    """One process; ``ready``: it answers, and for the batcher: it has a live worker."""

    name: str
    pid: int | None
    alive: bool
    ready: bool
    uptime_s: float | None
    restarts: int
    reloads: int
    port: int | None
    log: str | None


@dataclass(frozen=True)
class ModelReport:
    """One model, as the gateway lists it."""

    name: str
    tier: str
    ready: bool
    slots: int
    running: int
    queued: int


@dataclass(frozen=True)
class MeshReport:
    """A mesh, or its absence.

    Attributes:
        ready: whether everything is; what the exit code says.
        problem: one line for people when it is not.
        pid: of the supervisor.
        routers: the learned routers in use.
    """

    ready: bool
    problem: str | None
    state_dir: str
    pid: int | None = None
    address: str | None = None
    nats_url: str | None = None
    triton_url: str | None = None
    processes: tuple[ProcessReport, ...] = ()
    models: tuple[ModelReport, ...] = ()
    routers: tuple[RouterHealth, ...] = ()


async def report_of(directory: StateDir) -> MeshReport:
    """Asks everything at once; takes little more than `BOUND_S` at worst."""
    state = directory.read()
    locked = directory.is_locked()
    if state is None:
        problem = (
            "a supervisor is starting" if locked else "no mesh is running; start one: sluice up"
        )
        return MeshReport(False, problem, str(directory.root))
    said = _Said()
    answering: dict[str, bool] = {}
    if locked:
        said, answering = await _ask(state)
    processes = tuple(
        _process_report(process, answering.get(process.name, False)) for process in state.processes
    )
    why_not = _problem(state, locked, processes, said.models)
    return MeshReport(
        ready=why_not is None,
        problem=why_not,
        state_dir=str(directory.root),
        pid=state.pid if locked else None,
        address=state.address,
        nats_url=state.nats_url,
        triton_url=state.triton_url,
        processes=processes,
        models=said.models,
        routers=said.routers,
    )


@dataclass(frozen=True)
class _Said:
    """What the gateway says; by default it says nothing."""

    answers: bool = False
    models: tuple[ModelReport, ...] = ()
    routers: tuple[RouterHealth, ...] = ()


async def _ask(state: MeshState) -> tuple[_Said, dict[str, bool]]:
    gateway, nats, triton = await asyncio.gather(
        _ask_gateway(state.address), _nats_answers(state), _triton_answers(state)
    )
    answering = {
        specs.GATEWAY: gateway.answers,
        specs.BATCHER: any(model.ready for model in gateway.models),
        specs.NATS: nats,
        specs.TRITON: triton,
    }
    return gateway, answering


async def _ask_gateway(address: str) -> _Said:
    try:
        async with channel(address) as open_channel, asyncio.timeout(BOUND_S):
            await open_channel.channel_ready()
            stub = inference_pb2_grpc.InferenceServiceStub(open_channel)
            listed = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=BOUND_S)
            admin = admin_pb2_grpc.AdminServiceStub(open_channel)
            health_of = admin.GetRouterHealth(admin_pb2.GetRouterHealthRequest(), timeout=BOUND_S)
            routers = tuple(routers_of(await health_of))
    except (TimeoutError, grpc.aio.AioRpcError):
        return _Said()
    models = tuple(
        ModelReport(m.name, m.tier, m.ready, m.slots, m.running, m.queued) for m in listed.models
    )
    return _Said(True, models, routers)


async def _nats_answers(state: MeshState) -> bool:
    try:
        await wait_for_nats(state.nats_url, BOUND_S)
    except TimeoutError:
        return False
    return True


async def _triton_answers(state: MeshState) -> bool:
    if state.triton_url is None:
        return False
    try:
        await wait_for_triton(reachable(state.triton_url), BOUND_S)
    except TimeoutError:
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
        reloads=process.reloads,
        port=process.port,
        log=process.log,
    )


def _problem(
    state: MeshState,
    locked: bool,
    processes: tuple[ProcessReport, ...],
    models: tuple[ModelReport, ...],
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
