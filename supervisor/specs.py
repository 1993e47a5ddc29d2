"""How each process of a planned mesh is started."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from sluice.settings.mesh import ProcessSettings
from sluice.startup import ENGINE_NICE, child_environment, module_command
from supervisor.child import ChildSpec
from supervisor.model_processes import stub_pids
from supervisor.nats import NatsConfig, nats_command, nats_environment
from supervisor.plan import (
    BATCHER,
    GATEWAY,
    JOBS,
    NATS,
    TRITON,
    MeshPlan,
    RemoteConfig,
    ServerConfig,
    id_of,
)
from supervisor.state import StateDir
from supervisor.triton import (
    SPANS_S,
    TritonConfig,
    prepare_runtime,
    triton_command,
    triton_environment,
)

_REMOTE_MODULE: Final = "model_workers.remote"
_STAGES: Final = {NATS: 0, TRITON: 1, _REMOTE_MODULE: 1, BATCHER: 2, GATEWAY: 3, JOBS: 4}
"""What ends before what, the highest first: whoever asks before whoever answers."""

RESUME_KEY: Final = "SLUICE_GATEWAY__RESUME_KEY"
MESH_KEY: Final = "SLUICE_IDENTITY__MESH_KEY"
"""In the environment, so that they are in no file but those that hold them."""
NATS_URL: Final = "SLUICE_NATS__URL"
CERTIFICATE_FOLDER: Final = "SLUICE_TLS__MESH"
_MARGIN_S: Final = 3.0
"""What a stop may take on top of the drain, seconds."""
JOBS_NICE: Final = 14
"""Archives and tables of one tenant take a core for seconds; calls of others go first, and so do engines. But those
wait for the items that it sends: with nice 19 it waited for a core while they had none."""


def nats_spec(config: NatsConfig, state: StateDir) -> ChildSpec:
    """Return the spec of nats-server, and write its configuration file."""
    return ChildSpec(
        name=NATS,
        argv=nats_command(config, state.root / "nats.conf"),
        env={**child_environment(), **nats_environment(config)},
        log=state.log(NATS),
        port=config.port,
        stop_s=_MARGIN_S,
        stage=_STAGES[NATS],
    )


def triton_spec(config: TritonConfig, log: Path | None) -> ChildSpec:
    """Return how tritonserver is started; fill its runtime folder, if it needs one.

    Triton starts the process of a model through a shell, with unquoted paths. So it runs in its repository and gets
    paths relative to that, which hold nothing of the name of the state directory.
    """
    if config.program is None:
        prepare_runtime(config.runtime)
    inside = replace(
        config,
        repository=Path(),
        runtime=Path(os.path.relpath(config.runtime, config.repository)),
        tls=config.tls and config.tls.absolute(),
    )
    environment = triton_environment(
        inside.runtime if config.program is None else None, child_environment()
    )
    return ChildSpec(
        name=config.name,
        argv=triton_command(inside),
        env={**environment, ENGINE_NICE: str(config.nice)},
        log=log,
        folder=config.repository,
        parts_of=lambda pid: stub_pids(pid).values(),
        linger_s=0.0 if config.otlp_endpoint is None else SPANS_S,
        port=config.port,
        page=config.page,
        stop_s=config.exit_timeout_s + _MARGIN_S,
        stage=_STAGES[TRITON],
    )


def remote_spec(plan: MeshPlan, config: RemoteConfig) -> ChildSpec:
    """Describe a worker of a remote server; batchers know it by the certificate of workers."""
    own = ("--model", config.model, "--number", str(config.number), "--port", str(config.port))
    return ChildSpec(
        name=config.name,
        argv=(*module_command(_REMOTE_MODULE, config.config), *own),
        env={**child_environment(), **_certificate(plan, TRITON)},
        log=plan.state.log(config.name),
        port=config.port,
        stop_s=_MARGIN_S,
        stage=_STAGES[_REMOTE_MODULE],
    )


def server_spec(plan: MeshPlan, config: ServerConfig) -> ChildSpec:
    """Describe a gateway, the batcher or a process of jobs, which all read one file.

    The environment overrides the file where processes differ: addresses, pages, credentials. A process with a
    certificate gets the id that NATS knows it by. So does a jobs process, which then continues its jobs at once after
    a restart. Others choose a new id at each start. The keys of the mesh are made if there are none.
    """
    kind, settings = config.kind, plan.settings
    own = {f"SLUICE_{kind.upper()}__ADDRESS": config.address} if config.address else {}
    if config.http is not None:
        own["SLUICE_HTTP__ADDRESS"] = config.http
    if config.page is not None:
        own[f"SLUICE_TELEMETRY__PROMETHEUS__{kind.upper()}"] = config.page
    if plan.nats is not None and plan.nats.passwords:
        own[NATS_URL] = plan.nats.url_of(id_of(config.name))
    own |= _certificate(plan, config.name)
    if kind != BATCHER:
        own[MESH_KEY] = plan.state.mesh_key(settings.identity.mesh_key)
    if kind == GATEWAY:
        own[RESUME_KEY] = settings.gateway.resume_key or plan.state.resume_key()
    section: ProcessSettings = getattr(settings, kind)
    named = kind == JOBS or plan.authority is not None
    identity = ("--id", id_of(config.name)) if named else ()
    return ChildSpec(
        name=config.name,
        argv=(*module_command(kind, plan.state.config), *identity),
        env={**child_environment(), **own},
        log=plan.state.log(config.name),
        port=config.port,
        page=config.page,
        stop_s=section.drain_s + _MARGIN_S,
        stage=_STAGES[kind],
        nice=JOBS_NICE if kind == JOBS else 0,
    )


def _certificate(plan: MeshPlan, process: str) -> dict[str, str]:
    """Return the environment that names the folder of a process's certificate."""
    if plan.authority is None:
        return {}
    return {CERTIFICATE_FOLDER: str(plan.authority.of(id_of(process)))}
