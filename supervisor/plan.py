"""What a mesh runs, with every check that is possible before anything is started.

Each problem is one line that names the setting and says what to do (`SetupError`, `SettingsError`).
"""

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from model_workers.model_folder import check_model
from model_workers.remote.key import check_key
from sluice.errors import SetupError
from sluice.settings import ModelSettings, Settings, SettingsError
from sluice.startup import LOOPBACK, answers, check_reach, split_address
from sluice.telemetry.exporters import triton_endpoint
from sluice.wire import permissions
from sluice.wire.subjects import ANY
from supervisor.disk import file_limit
from supervisor.nats import NatsConfig, find_nats_server
from supervisor.ports import Ports
from supervisor.state import StateDir
from supervisor.triton import TritonConfig, find_libpython, find_program, find_wheel

if TYPE_CHECKING:
    from supervisor.certificates import Authority

NATS: Final = "nats"
TRITON: Final = "triton"
"""The server of `sluice worker`; those of a mesh have the names of their workers behind it: "triton-small.1"."""
REMOTE: Final = "remote"
"""Workers that ask somebody else's server: "remote-gpt", "remote-gpt.1"."""
BATCHER: Final = "batcher"
GATEWAY: Final = "gateway"
JOBS: Final = "jobs"
OPERATOR: Final = permissions.OPERATOR
"""The name of the supervisor and of commands in their certificate."""

ENGINES_NICE: Final = 3
"""Engines compute without a pause. Where they have as many threads as there are cores, frames would wait behind them in
gateways, batchers and NATS, so threads that compute give way. They do so a little, and not at all where a core is left:
each thread that wakes would take their core for as long as it likes, also beside an idle one, and rows queue for the
steps that are lost."""
EXTERNAL_BOUND_S: Final = 3.0
"""How long an external server may take to accept a connection, seconds."""


@dataclass(frozen=True)
class ServerConfig:
    """One process of our own: a gateway, the batcher, or one that runs jobs.

    Attributes:
        kind: its package.
        name: of its process: "gateway", then "gateway.1".
        address: host and port of gRPC; empty: it has none.
        page: host and port of its page of metrics, if it has one.
        http: host and port of OpenAI's API, if it has one.
    """

    kind: str
    name: str
    address: str = ""
    page: str | None = None
    http: str | None = None

    @property
    def port(self) -> int | None:
        """Of gRPC; None without an address."""
        return int(self.address.rpartition(":")[2]) if self.address else None


@dataclass(frozen=True)
class RemoteConfig:
    """One worker of a model that somebody else's server computes.

    Attributes:
        name: of its process.
        model: which one.
        number: of the worker among those of its model.
        port: of gRPC, on loopback.
        config: the file that it reads.
    """

    name: str
    model: str
    number: int
    port: int
    config: Path

    @property
    def address(self) -> str:
        """Where to call it."""
        return f"{LOOPBACK}:{self.port}"


@dataclass(frozen=True)
class MeshPlan:
    """A mesh that can be started.

    Attributes:
        models: the models as the configuration has them.
        settings: with every address filled in.
        nats: the embedded server; None when an external one is named.
        tritons: the embedded servers, one for each worker, so that workers survive each other.
        remotes: the workers of models that somebody else's servers compute.
        gateways: `gateway.replicas` of them; the settings have the addresses of the first.
        jobs: `jobs.replicas` of them; the settings have all their addresses.
        batcher: the only one.
        authority: gives each process its certificate; None: the mesh is not encrypted, or its settings name files.
    """

    models: tuple[ModelSettings, ...]
    settings: Settings
    state: StateDir
    nats: NatsConfig | None
    tritons: tuple[TritonConfig, ...]
    remotes: tuple[RemoteConfig, ...]
    gateways: tuple[ServerConfig, ...]
    jobs: tuple[ServerConfig, ...]
    batcher: ServerConfig
    authority: "Authority | None" = None

    @property
    def processes(self) -> dict[str, tuple[str, str]]:
        """Ids of the processes that connect to NATS, with their kinds and ids."""
        servers = {
            id_of(one.name): (one.kind, id_of(one.name))
            for one in (*self.gateways, self.batcher, *self.jobs)
        }
        return {**servers, OPERATOR: (permissions.OPERATOR, OPERATOR)}


def id_of(process: str) -> str:
    """Return the id of a process of this name, which is part of subjects."""
    return process.replace(".", "-")


def make_plan(settings: Settings, state: StateDir) -> MeshPlan:
    """Check `settings` and this machine, and pick ports; start nothing and write nothing.

    Raises:
        SetupError: something on this machine is missing or taken, or an external server does not answer.
        SettingsError: a model cannot be served, or a setting does not fit the others.
    """
    check_models(settings)
    ports = Ports()
    gateways = _plan_gateways(settings, ports)
    count = settings.jobs.replicas
    addresses = ports.own("jobs.address", settings.jobs.address, count) if count else []
    jobs = _numbered(JOBS, addresses, settings, ports)
    nats_config = _plan_nats(settings, state, ports)
    tritons = _plan_tritons(settings, state, ports)
    remotes = _plan_remotes(settings, state, ports)
    (page,) = ports.pages(BATCHER, settings.telemetry.prometheus.get(BATCHER))
    batcher = ServerConfig(BATCHER, BATCHER, page=page)
    plan = MeshPlan(
        settings.models, settings, state, nats_config, tritons, remotes, gateways, jobs, batcher
    )
    plan = _resolved(plan)
    if settings.tls.embedded:
        return _secured(plan)
    return plan if nats_config is None else _with_passwords(plan, nats_config)


def plan_version(plan: MeshPlan, settings: Settings, model: ModelSettings) -> MeshPlan:
    """Return `plan` with the workers of `model` alone, on free ports, under the new `settings`.

    Raises:
        SetupError: Nothing answers at its address, or something on this machine is missing.
        SettingsError: A key of a remote server is missing.
    """
    folder, ports = version_folder(plan, model), Ports()
    alone = changed(settings.model_copy(update={"models": (model,)}), triton={"port": 0})
    # Pages of later workers have free ports.
    if alone.telemetry.prometheus.get("triton") is not None:
        alone = with_pages(alone, triton=f"{LOOPBACK}:0")
    tls = None if plan.authority is None else plan.authority.of(TRITON)
    tritons = tuple(
        replace(one, repository=folder / one.repository.name, tls=tls or one.tls)
        for one in _plan_tritons(alone, plan.state, ports)
    )
    remotes = tuple(
        replace(remote, config=folder / "config.yaml")
        for remote in _plan_remotes(alone, plan.state, ports)
    )
    settings = settings.model_copy(update={"models": (_served_by(model, tritons, remotes),)})
    return replace(plan, settings=settings, tritons=tritons, remotes=remotes)


def version_folder(plan: MeshPlan, model: ModelSettings) -> Path:
    """Return the folder of a version of a model: of its Triton repositories, or of the file of its remote workers."""
    return plan.state.versions / model.task_name


def changed(settings: Settings, **sections: Mapping[str, object]) -> Settings:
    """Return `settings` with other values of some fields of `sections`."""
    update = {
        name: getattr(settings, name).model_copy(update=fields) for name, fields in sections.items()
    }
    return settings.model_copy(update=update)


def with_pages(settings: Settings, **pages: str | None) -> Settings:
    """Return `settings` with other pages of metrics."""
    prometheus = {str(name): page for name, page in settings.telemetry.prometheus.items()} | pages
    return changed(settings, telemetry={"prometheus": prometheus})


def _with_passwords(plan: MeshPlan, nats_config: NatsConfig) -> MeshPlan:
    """Give each process of `plan` a NATS password, new at each start; the settings get the operator's.

    Processes choose their ids when they start, so the permissions are those of a kind, for any id (`ANY`).
    """
    nats_config = replace(
        nats_config,
        users={process: (kind, ANY) for process, (kind, _) in plan.processes.items()},
        passwords={process: secrets.token_urlsafe(24) for process in plan.processes},
    )
    settings = changed(plan.settings, nats={"url": nats_config.url_of(OPERATOR)})
    return replace(plan, settings=settings, nats=nats_config)


def _secured(plan: MeshPlan) -> MeshPlan:
    """Return `plan` with a certificate for each process."""
    if plan.nats is None:
        raise SetupError(
            "tls.embedded: nats.url names a server of its own; name its certificates in tls.mesh instead"
        )
    from supervisor.certificates import Authority  # its library takes long to import

    authority = Authority(plan.state.tls)
    nats_config = replace(plan.nats, tls=authority.of(NATS), users=plan.processes)
    tritons = tuple(replace(triton, tls=authority.of(TRITON)) for triton in plan.tritons)
    settings = changed(
        plan.settings, nats={"url": nats_config.url}, tls={"mesh": authority.of(OPERATOR)}
    )
    return replace(plan, settings=settings, nats=nats_config, tritons=tritons, authority=authority)


def certify(plan: MeshPlan) -> None:
    """Issue the certificates that are missing, broken, about to expire, or not valid for the hosts of the gateways.

    Raises:
        SetupError: a file cannot be written.
    """
    if plan.authority is not None:
        hosts = [split_address(gateway.address, "gateway.address")[0] for gateway in plan.gateways]
        if any(host in ("0.0.0.0", "::") for host in hosts):
            hosts = [socket.gethostname()]
        plan.authority.ensure((NATS, TRITON, *plan.processes), hosts)


def plan_triton(
    settings: Settings,
    root: Path,
    name: str,
    models: tuple[str, ...],
    host: str,
    port: int,
    program: str | None = None,
) -> TritonConfig:
    """Return the server called `name` with its files under `root`.

    Raises:
        SetupError: `program`, or without one Triton's wheel or libpython, is missing.
    """
    path = None if program is None else find_program(program)
    if path is None:
        find_wheel()
        find_libpython()
    endpoint = triton_endpoint(settings.telemetry.otlp_http_endpoint)
    return TritonConfig(
        name=name,
        repository=root / "models",
        models=models,
        runtime=root / "triton",
        port=port,
        host=host,
        secret=secrets.token_urlsafe(24),
        otlp_endpoint=endpoint.removesuffix("/v1/traces") if endpoint else None,
        load_timeout_s=max(1, int(settings.triton.start_s)),
        shm_prefix=f"{shm_prefix(root)}{name}_",
        tls=settings.tls.mesh,
        program=path,
    )


def shm_prefix(root: Path) -> str:
    """Return the prefix of a folder's shared memory, the same at every start: what a killed server left is found."""
    return f"sluice_{hashlib.sha256(bytes(root)).hexdigest()[:12]}_"


def kind_of(process: str) -> str:
    """Return the kind of a process of this name: of "gateway.1" "gateway", of "triton-small" "triton"."""
    return re.split(r"[.-]", process)[0]


def is_worker(process: str) -> bool:
    """Return whether a process of this name is a worker, with Triton or without."""
    return kind_of(process) in (TRITON, REMOTE)


def embedded_models(settings: Settings) -> tuple[ModelSettings, ...]:
    """Return the models whose workers the mesh starts itself."""
    return tuple(
        model
        for model in settings.models
        if not model.triton_urls and (settings.triton.url is None or model.server is not None)
    )


def check_models(settings: Settings) -> None:
    """Raise SettingsError if a model cannot be served."""
    for model in settings.models:
        check_model(model)


def _plan_gateways(settings: Settings, ports: Ports) -> tuple[ServerConfig, ...]:
    count, http = settings.gateway.replicas, settings.http.address
    check_reach(settings, "gateway.address", settings.gateway.address)
    addresses = ports.addresses("gateway.address", settings.gateway.address, count)
    gateways = _numbered(GATEWAY, addresses, settings, ports)
    if http is None:
        return gateways
    check_reach(settings, "http.address", http)
    https = ports.addresses("http.address", http, count)
    return tuple(replace(one, http=at) for one, at in zip(gateways, https, strict=True))


def _numbered(
    kind: Literal["gateway", "jobs"],
    addresses: Sequence[str],
    settings: Settings,
    ports: Ports,
) -> tuple[ServerConfig, ...]:
    pages = ports.pages(kind, settings.telemetry.prometheus.get(kind), len(addresses))
    return tuple(
        ServerConfig(kind, f"{kind}.{number}" if number else kind, address, page)
        for number, (address, page) in enumerate(zip(addresses, pages, strict=True))
    )


def _plan_nats(settings: Settings, state: StateDir, ports: Ports) -> NatsConfig | None:
    if settings.nats.url is not None:
        _check_external("nats.url", *settings.nats.url.split(","))
        if settings.nats.encryption_key is not None:
            raise SettingsError(
                "nats.encryption_key: is of the embedded server; write it into the configuration of the one in nats.url"
            )
        return None
    find_nats_server()
    (page,) = ports.pages("nats", settings.telemetry.prometheus.get("nats"))
    return NatsConfig(
        port=ports.take("nats.port", LOOPBACK, settings.nats.port),
        store=state.nats,
        monitor=page,
        input_streams=tuple(settings.jobs.input_streams),
        encryption_key=settings.nats.encryption_key,
        max_file_bytes=file_limit(settings, state.root),
    )


def _plan_tritons(settings: Settings, state: StateDir, ports: Ports) -> tuple[TritonConfig, ...]:
    for index, model in enumerate(settings.models):
        for url in model.triton_urls:
            _check_external(f"models.{index}.triton_url", url)
    if settings.triton.url is not None:
        _check_external("triton.url", settings.triton.url)
    workers = [
        (model, process, worker)
        for model in embedded_models(settings)
        if model.server is None
        for process, worker in zip(_process_names(model), model.triton_models, strict=True)
    ]
    first, planned = settings.triton.port, []
    for number, (model, process, worker) in enumerate(workers):
        port = ports.take("triton.port", LOOPBACK, first and first + number)
        name = f"{TRITON}-{process}"
        config = plan_triton(settings, state.root, name, (model.name,), LOOPBACK, port)
        # Its own repository, because it may have its own devices.
        planned.append(replace(config, repository=state.models / worker))
    pages = ports.pages("triton", settings.telemetry.prometheus.get("triton"), len(planned))
    all_cores = sum(model.threads for model, *_ in workers) >= len(os.sched_getaffinity(0))
    nice = ENGINES_NICE if all_cores else 0
    return tuple(
        replace(one, page=page, nice=nice) for one, page in zip(planned, pages, strict=True)
    )


def _process_names(model: ModelSettings) -> list[str]:
    """Of its workers, without their kind: "small", "small.1"; of a later version "small--1", "small--1.1"."""
    return [model.task_name + name.removeprefix(model.name) for name in model.triton_models]


def _plan_remotes(settings: Settings, state: StateDir, ports: Ports) -> tuple[RemoteConfig, ...]:
    planned = []
    for model in embedded_models(settings):
        if model.server is None:
            continue
        check_key(model.name, model.server)
        for number, worker in enumerate(_process_names(model)):
            port, name = ports.take("", LOOPBACK, 0), f"{REMOTE}-{worker}"
            planned.append(RemoteConfig(name, model.name, number, port, state.config))
    return tuple(planned)


def _check_external(key: str, *urls: str) -> None:
    """Raise SetupError unless at least one of several servers accepts a connection."""
    addresses = [url.rpartition("://")[2].rpartition("@")[2].rstrip("/") for url in urls]
    hosts = [split_address(address, key) for address in addresses]
    if not any(answers(host, port, EXTERNAL_BOUND_S) for host, port in hosts):
        where = ", ".join(addresses)
        raise SetupError(f"{key}: nothing answers at {where}; start it, or remove {key}")


def _resolved(plan: MeshPlan) -> MeshPlan:
    """Return `plan` with all addresses in its settings: of the first gateway, all workers and all jobs processes."""
    settings, first = plan.settings, plan.gateways[0]
    models = tuple(_served_by(model, plan.tritons, plan.remotes) for model in settings.models)
    settings = settings.model_copy(update={"models": models})
    jobs_page = plan.jobs[0].page if plan.jobs else None
    settings = with_pages(settings, gateway=first.page, batcher=plan.batcher.page, jobs=jobs_page)
    settings = changed(settings, gateway={"address": first.address}, http={"address": first.http})
    if plan.jobs:
        addresses = {"address": ",".join(job.address for job in plan.jobs)}
        addresses["gateways"] = ",".join(gateway.address for gateway in plan.gateways)
        settings = changed(settings, jobs=addresses)
    if plan.nats is not None:
        settings = changed(settings, nats={"url": plan.nats.url, "port": plan.nats.port})
    return replace(plan, settings=settings)


def _served_by(
    model: ModelSettings, tritons: Iterable[TritonConfig], remotes: Iterable[RemoteConfig]
) -> ModelSettings:
    """Return `model` with the addresses of its workers if the mesh serves it."""
    addresses = [config.address for config in tritons if model.name in config.models]
    addresses += [one.address for one in remotes if one.model == model.name]
    served = {"triton_url": tuple(addresses), "replicas": 1}
    return model.model_copy(update=served) if addresses else model
