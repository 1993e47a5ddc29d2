"""What a mesh runs: every check that is possible before anything is started, and how each process is started.

Each problem is one line that names the setting and says what to do (`SetupError`, `SettingsError`).
"""

import hashlib
import itertools
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from model_workers.model_folder import check_model
from model_workers.remote.key import check_key
from sluice.errors import SetupError
from sluice.settings import (
    ModelSettings,
    Settings,
    SettingsError,
    TelemetrySettings,
    otlp_http_endpoint,
)
from sluice.startup import (
    LOOPBACK,
    answers,
    check_reach,
    child_environment,
    free_port,
    is_loopback,
    listen_problem,
    module_command,
    split_address,
)
from sluice.wire import permissions
from sluice.wire.subjects import ANY
from supervisor.certificates import Authority
from supervisor.child import ChildSpec
from supervisor.nats import NatsConfig, find_nats_server, nats_command, nats_environment
from supervisor.state import StateDir
from supervisor.triton import (
    TritonConfig,
    find_libpython,
    find_program,
    find_wheel,
    prepare_runtime,
    triton_command,
    triton_environment,
)

NATS: Final = "nats"
TRITON: Final = "triton"
"""The server of `sluice worker`; those of a mesh have the names of their workers behind it: "triton-small.1"."""
REMOTE: Final = "remote"
"""Workers that ask somebody else's server: "remote-gpt", "remote-gpt.1"."""
BATCHER: Final = "batcher"
GATEWAY: Final = "gateway"
JOBS: Final = "jobs"
_REMOTE_MODULE: Final = "model_workers.remote"
_STAGES: Final = {NATS: 0, TRITON: 1, _REMOTE_MODULE: 1, BATCHER: 2, GATEWAY: 3, JOBS: 4}
"""What ends before what, the highest first: whoever asks before whoever answers."""
OPERATOR: Final = permissions.OPERATOR
"""The name of the supervisor and of commands in their certificate."""

RESUME_KEY: Final = "SLUICE_GATEWAY__RESUME_KEY"
MESH_KEY: Final = "SLUICE_IDENTITY__MESH_KEY"
"""In the environment, so that they are in no file but those that hold them."""
NATS_URL: Final = "SLUICE_NATS__URL"
CERTIFICATE_FOLDER: Final = "SLUICE_TLS__MESH"
_MARGIN_S: Final = 3.0
"""What a stop may take on top of the drain, seconds."""
MODELS_NICE: Final = 10
"""Engines compute without a pause; on cores that they share with gateways, batchers and NATS, frames would wait at each
of those. With two workers on two cores a gateway stood still for 0.4 to 1.2 s again and again
(docs/operate/deploy.md)."""
JOBS_NICE: Final = 19
"""Archives and tables of one tenant take a core for seconds; calls of others go first, and so do engines, which those
wait for."""
EXTERNAL_BOUND_S: Final = 3.0
"""How long an external server may take to accept a connection, seconds."""


@dataclass(frozen=True)
class ServerConfig:
    """One gateway, or one process that runs jobs.

    Attributes:
        name: of its process: "gateway", then "gateway.1".
        address: host and port of gRPC.
        page: host and port of its page of metrics, if it has one.
        http: host and port of OpenAI's API, if it has one.
    """

    name: str
    address: str
    page: str | None = None
    http: str | None = None

    @property
    def port(self) -> int:
        """Of gRPC."""
        return int(self.address.rpartition(":")[2])


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


@dataclass(frozen=True)
class MeshPlan:
    """A mesh that can be started.

    Attributes:
        asked: the models as the configuration has them.
        settings: with every address filled in.
        nats: the embedded server; None when an external one is named.
        tritons: the embedded servers, one for each worker, so that workers survive each other.
        remotes: the workers of models that somebody else's servers compute.
        gateways: `gateway.replicas` of them; the settings have the addresses of the first.
        jobs: `jobs.replicas` of them; the settings have all their addresses.
        authority: gives each process its certificate; None: the mesh is not encrypted, or its settings name files.
    """

    asked: tuple[ModelSettings, ...]
    settings: Settings
    state: StateDir
    nats: NatsConfig | None
    tritons: tuple[TritonConfig, ...]
    remotes: tuple[RemoteConfig, ...]
    gateways: tuple[ServerConfig, ...]
    jobs: tuple[ServerConfig, ...]
    authority: Authority | None = None

    @property
    def processes(self) -> dict[str, tuple[str, str]]:
        """Names of the processes that connect to NATS, with their kinds and ids."""
        gateways = {
            id_of(one.name): (permissions.GATEWAY, id_of(one.name)) for one in self.gateways
        }
        jobs = {id_of(one.name): (permissions.JOBS, id_of(one.name)) for one in self.jobs}
        return {
            **gateways,
            BATCHER: (permissions.BATCHER, BATCHER),
            **jobs,
            OPERATOR: (permissions.OPERATOR, OPERATOR),
        }


def id_of(process: str) -> str:
    """The id of a process of this name, which is part of subjects."""
    return process.replace(".", "-")


def make_plan(settings: Settings, state: StateDir) -> MeshPlan:
    """Checks ``settings`` and this machine, and picks ports; starts nothing and writes nothing.

    Raises:
        SetupError: something on this machine is missing or taken.
        SettingsError: a model folder is broken.
    """
    check_models(settings)
    taken: set[int] = set()
    gateways = _plan_gateways(settings, taken)
    jobs = _plan_jobs(settings, taken)
    nats_config = _plan_nats(settings, state, taken)
    tritons = _plan_tritons(settings, state, taken)
    remotes = _plan_remotes(settings, state, taken)
    page = _own_page("batcher", settings.telemetry.prometheus.batcher, taken)
    addresses = worker_addresses(tritons, remotes)
    resolved = _resolve(settings, gateways, jobs, page, nats_config, addresses)
    asked = settings.models
    plan = MeshPlan(asked, resolved, state, nats_config, tritons, remotes, gateways, jobs)
    if settings.tls.embedded:
        return _secured(plan)
    return plan if nats_config is None else _with_passwords(plan, nats_config)


def worker_addresses(
    tritons: Sequence[TritonConfig], remotes: Sequence[RemoteConfig]
) -> list[tuple[str, str]]:
    """Each model's name with the address of one of its workers."""
    found = [(one, config.address) for config in tritons for one in config.models]
    return found + [(config.model, f"{LOOPBACK}:{config.port}") for config in remotes]


@dataclass(frozen=True)
class VersionPlan:
    """The workers of one version of a model.

    Attributes:
        settings: with their addresses.
        folder: the Triton repository of its own, or where the file of remote workers goes.
    """

    settings: ModelSettings
    tritons: tuple[TritonConfig, ...]
    remotes: tuple[RemoteConfig, ...]
    folder: Path


def plan_version(plan: MeshPlan, settings: Settings, model: ModelSettings) -> VersionPlan:
    """Workers of ``model``, which a running mesh begins to serve, on free ports; ``settings`` are the new ones.

    Raises:
        SetupError: nothing answers at its address, or something on this machine is missing.
        SettingsError: a key of another server is missing.
    """
    folder = plan.state.versions / model.task_name
    alone = settings.model_copy(
        update={
            "models": (model,),
            "triton": settings.triton.model_copy(update={"port": 0}),
            "telemetry": _any_page(settings),
        }
    )
    taken: set[int] = set()
    tritons = tuple(
        replace(
            one,
            repository=folder / one.repository.name,
            tls=one.tls if plan.authority is None else plan.authority.of(TRITON),
        )
        for one in _plan_tritons(alone, plan.state, taken)
    )
    remotes = tuple(
        replace(one, config=folder / "config.yaml")
        for one in _plan_remotes(alone, plan.state, taken)
    )
    served = _served_by(model, worker_addresses(tritons, remotes))
    return VersionPlan(served, tritons, remotes, folder)


def _any_page(settings: Settings) -> TelemetrySettings:
    """Where Triton has pages of metrics, those of later workers have free ports."""
    pages = settings.telemetry.prometheus
    if pages.triton is None:
        return settings.telemetry
    own = pages.model_copy(update={"triton": f"{LOOPBACK}:0"})
    return settings.telemetry.model_copy(update={"prometheus": own})


def _with_passwords(plan: MeshPlan, nats_config: NatsConfig) -> MeshPlan:
    """``plan`` with a password for each process, new at each start; its settings have the operator's.

    Ids of processes are new at each start too, so that NATS knows their kinds.
    """
    nats_config = replace(
        nats_config,
        users={process: (kind, ANY) for process, (kind, _) in plan.processes.items()},
        passwords={process: secrets.token_urlsafe(24) for process in plan.processes},
    )
    nats_settings = plan.settings.nats.model_copy(update={"url": nats_config.url_of(OPERATOR)})
    settings = plan.settings.model_copy(update={"nats": nats_settings})
    return replace(plan, settings=settings, nats=nats_config)


def _secured(plan: MeshPlan) -> MeshPlan:
    """``plan`` with a certificate for each process."""
    if plan.nats is None:
        raise SetupError(
            "tls.embedded: nats.url names a server of its own; name its certificates in tls.mesh instead"
        )
    authority = Authority(plan.state.tls)
    nats_config = replace(plan.nats, tls=authority.of(NATS), users=plan.processes)
    tritons = tuple(replace(one, tls=authority.of(TRITON)) for one in plan.tritons)
    settings = plan.settings.model_copy(
        update={
            "nats": plan.settings.nats.model_copy(update={"url": nats_config.url}),
            "tls": plan.settings.tls.model_copy(update={"mesh": authority.of(OPERATOR)}),
        }
    )
    return replace(plan, settings=settings, nats=nats_config, tritons=tritons, authority=authority)


def certify(plan: MeshPlan) -> None:
    """Makes the certificates that are missing or about to expire.

    Raises:
        SetupError: a file cannot be written.
    """
    if plan.authority is not None:
        hosts = [split_address(one.address, "gateway.address")[0] for one in plan.gateways]
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
    """The server called ``name`` with its files under ``root``; ``program`` as `TritonConfig`, or its name on PATH.

    Raises:
        SetupError: ``program``, or without one Triton's wheel or libpython, is missing.
    """
    found = None if program is None else find_program(program)
    if found is None:
        find_wheel()
        find_libpython()
    endpoint = otlp_http_endpoint(settings)
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
        program=found,
    )


def shm_prefix(root: Path) -> str:
    """Prefix of this folder's shared memory: the same at every start, so that what a killed server left is found."""
    return f"sluice_{hashlib.sha256(bytes(root)).hexdigest()[:12]}_"


def is_gateway(process: str) -> bool:
    """Whether a process of this name is a gateway."""
    return process.partition(".")[0] == GATEWAY


def is_jobs(process: str) -> bool:
    """Whether a process of this name runs jobs."""
    return process.partition(".")[0] == JOBS


def is_worker(process: str) -> bool:
    """Whether a process of this name is a Triton with a worker in it, or a worker without one."""
    return process.startswith((TRITON, REMOTE))


def embedded_models(settings: Settings) -> tuple[ModelSettings, ...]:
    """The models whose workers the mesh starts itself."""
    return tuple(
        model
        for model in settings.models
        if not model.triton_urls and (settings.triton.url is None or model.server is not None)
    )


def check_models(settings: Settings) -> None:
    """Raises SettingsError for the first model that cannot be served."""
    for model in settings.models:
        try:
            check_model(model)
        except SettingsError as error:
            key = f"models: {model.name}: "
            raise SettingsError(key + str(error).removeprefix(key)) from error


def checked_port(key: str, host: str, port: int, taken: set[int]) -> int:
    """``port``, or a free one for 0; it is added to ``taken``.

    Raises:
        SetupError: it cannot be listened on; ``key`` names the setting.
    """
    if port == 0:
        port = free_port(host, taken)
    elif problem := listen_problem(host, port):
        raise SetupError(f"{key}: {host}:{port} is {problem}; free it or choose another one")
    elif port in taken:
        raise SetupError(
            f"{key}: port {port} is another server's of this mesh already; choose another"
        )
    taken.add(port)
    return port


def nats_spec(config: NatsConfig, state: StateDir) -> ChildSpec:
    """nats-server; writes its configuration file."""
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
    """tritonserver; fills its runtime folder, if it needs one."""
    runtime = config.runtime if config.program is None else None
    if runtime is not None:
        prepare_runtime(runtime)
    return ChildSpec(
        name=config.name,
        argv=triton_command(config),
        env=triton_environment(runtime, child_environment()),
        log=log,
        port=config.port,
        page=None if config.metrics_port is None else f"{LOOPBACK}:{config.metrics_port}",
        stop_s=config.exit_timeout_s + _MARGIN_S,
        stage=_STAGES[TRITON],
        nice=MODELS_NICE,
    )


def remote_spec(plan: MeshPlan, config: RemoteConfig) -> ChildSpec:
    """A worker that asks somebody else's server."""
    spec = _python_spec(_REMOTE_MODULE, plan.state, config.port, 0.0)
    argv = module_command(_REMOTE_MODULE, config.config)
    own = ("--model", config.model, "--number", str(config.number), "--port", str(config.port))
    env = {**spec.env, **_certificate(plan, TRITON)}  # of a worker, as batchers know it
    log = plan.state.log(config.name)
    return replace(spec, name=config.name, argv=(*argv, *own), env=env, log=log)


def batcher_spec(plan: MeshPlan) -> ChildSpec:
    """The batcher."""
    drain_s = plan.settings.batcher.drain_s
    spec = _python_spec(BATCHER, plan.state, None, drain_s)
    return _named(plan, replace(spec, page=plan.settings.telemetry.prometheus.batcher))


def gateway_spec(plan: MeshPlan, config: ServerConfig) -> ChildSpec:
    """One of the gateways; makes the key of resume tokens, unless the settings have one.

    They share a file; where their addresses differ the environment says so.
    """
    spec = _python_spec(GATEWAY, plan.state, config.port, plan.settings.gateway.drain_s)
    own = {
        RESUME_KEY: plan.settings.gateway.resume_key or plan.state.resume_key(),
        MESH_KEY: plan.settings.identity.mesh_key or plan.state.mesh_key(),
    }
    if config is not plan.gateways[0]:
        own["SLUICE_GATEWAY__ADDRESS"] = config.address
        if config.http is not None:
            own["SLUICE_HTTP__ADDRESS"] = config.http
        if config.page is not None:
            own["SLUICE_TELEMETRY__PROMETHEUS__GATEWAY"] = config.page
    log = plan.state.log(config.name)
    env = {**spec.env, **own}
    return _named(plan, replace(spec, name=config.name, env=env, log=log, page=config.page))


def jobs_spec(plan: MeshPlan, config: ServerConfig) -> ChildSpec:
    """One of the processes that run jobs. It keeps its name, so that it goes on with its jobs at once."""
    spec = _python_spec(JOBS, plan.state, config.port, plan.settings.jobs.drain_s)
    argv = (*spec.argv, "--id", id_of(config.name))
    key = plan.settings.identity.mesh_key or plan.state.mesh_key()
    own = {"SLUICE_JOBS__ADDRESS": config.address, MESH_KEY: key}
    env = {**spec.env, **_credentials(plan, config.name), **own}
    if config.page is not None:
        env["SLUICE_TELEMETRY__PROMETHEUS__JOBS"] = config.page
    log = plan.state.log(config.name)
    return replace(
        spec, name=config.name, argv=argv, env=env, log=log, page=config.page, nice=JOBS_NICE
    )


def _named(plan: MeshPlan, spec: ChildSpec) -> ChildSpec:
    """With certificates a process has the id that NATS knows it by; else a new one at each start."""
    env = {**spec.env, **_credentials(plan, spec.name)}
    argv = spec.argv if plan.authority is None else (*spec.argv, "--id", id_of(spec.name))
    return replace(spec, argv=argv, env=env)


def _credentials(plan: MeshPlan, process: str) -> dict[str, str]:
    """The environment that tells a process its password for NATS, or the folder of its certificate."""
    if plan.nats is not None and plan.nats.passwords:
        return {NATS_URL: plan.nats.url_of(id_of(process))}
    return _certificate(plan, process)


def _certificate(plan: MeshPlan, process: str) -> dict[str, str]:
    """The environment that names the folder of a process's certificate."""
    if plan.authority is None:
        return {}
    return {CERTIFICATE_FOLDER: str(plan.authority.of(id_of(process)))}


def _plan_jobs(settings: Settings, taken: set[int]) -> tuple[ServerConfig, ...]:
    count = settings.jobs.replicas
    if not count:
        return ()
    addresses = _own_addresses("jobs.address", settings.jobs.address, count, taken)
    pages = _pages("jobs", settings.telemetry.prometheus.jobs, count, taken)
    names = [JOBS, *(f"{JOBS}.{number}" for number in range(1, count))]
    return tuple(map(ServerConfig, names, addresses, pages))


def _plan_gateways(settings: Settings, taken: set[int]) -> tuple[ServerConfig, ...]:
    count = settings.gateway.replicas
    for key, address in (
        ("gateway.address", settings.gateway.address),
        ("http.address", settings.http.address),
    ):
        if address is not None:
            check_reach(settings, key, address)
    addresses = _addresses("gateway.address", settings.gateway.address, count, taken)
    page = settings.telemetry.prometheus.gateway
    http = settings.http.address
    https: list[str | None] = [None] * count
    if http is not None:
        https = [*_addresses("http.address", http, count, taken)]
    pages = _pages("gateway", page, count, taken)
    names = [GATEWAY, *(f"{GATEWAY}.{number}" for number in range(1, count))]
    return tuple(map(ServerConfig, names, addresses, pages, https))


def _own_page(process: str, address: str | None, taken: set[int]) -> str | None:
    """Where a process has its metrics."""
    return _pages(process, address, 1, taken)[0]


def _pages(process: str, address: str | None, count: int, taken: set[int]) -> list[str | None]:
    """The same of several processes."""
    if address is None:
        return [None] * count
    return [*_own_addresses(f"telemetry.prometheus.{process}", address, count, taken)]


def _own_addresses(key: str, address: str, count: int, taken: set[int]) -> list[str]:
    """The same on loopback alone."""
    host, _ = split_address(address, key)
    if not is_loopback(host):
        raise SetupError(
            f"{key}: {host} can be reached from other machines and there are no "
            f"credentials; use {LOOPBACK}"
        )
    return _addresses(key, address, count, taken)


def _addresses(key: str, address: str, count: int, taken: set[int]) -> list[str]:
    """From the port of ``address`` on; free ones when it is 0."""
    host, port = split_address(address, key)
    ports = [port and port + number for number in range(count)]
    return [_address(key, host, port, taken) for port in ports]


def _address(key: str, host: str, port: int, taken: set[int]) -> str:
    port = checked_port(key, host, port, taken)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _plan_nats(settings: Settings, state: StateDir, taken: set[int]) -> NatsConfig | None:
    if settings.nats.url is not None:
        _check_external("nats.url", *settings.nats.url.split(","))
        if settings.nats.encryption_key is not None:
            raise SettingsError(
                "nats.encryption_key: is of the embedded server; write it into the configuration of the one in nats.url"
            )
        return None
    find_nats_server()
    port = checked_port("nats.port", LOOPBACK, settings.nats.port, taken)
    page = _own_page("nats", settings.telemetry.prometheus.nats, taken)
    streams = tuple(settings.jobs.input_streams)
    return NatsConfig(
        port=port,
        store=state.nats,
        monitor=page,
        input_streams=streams,
        encryption_key=settings.nats.encryption_key,
    )


def _plan_tritons(settings: Settings, state: StateDir, taken: set[int]) -> tuple[TritonConfig, ...]:
    for index, model in enumerate(settings.models):
        for url in model.triton_urls:
            _check_external(f"models.{index}.triton_url", url)
    if settings.triton.url is not None:
        _check_external("triton.url", settings.triton.url)
    workers = [
        (f"{TRITON}-{process}", model.name, state.models / worker)
        for model in embedded_models(settings)
        if model.server is None
        for process, worker in zip(_process_names(model), model.triton_models, strict=True)
    ]
    ports = _worker_ports(settings, taken)
    planned = [
        # Its own repository, because it may have its own devices.
        replace(
            plan_triton(settings, state.root, name, (model,), LOOPBACK, port), repository=folder
        )
        for (name, model, folder), port in zip(workers, ports, strict=False)
    ]
    page = settings.telemetry.prometheus.triton
    if page is None:
        return tuple(planned)
    pages = _own_addresses("telemetry.prometheus.triton", page, len(planned), taken)
    page_ports = [int(address.rpartition(":")[2]) for address in pages]
    return tuple(map(lambda one, port: replace(one, metrics_port=port), planned, page_ports))


def _process_names(model: ModelSettings) -> list[str]:
    """Of its workers, without their kind: "small", "small.1"; of a later version "small--1", "small--1.1"."""
    return [model.task_name + name.removeprefix(model.name) for name in model.triton_models]


def _plan_remotes(settings: Settings, state: StateDir, taken: set[int]) -> tuple[RemoteConfig, ...]:
    planned = []
    for model in embedded_models(settings):
        if model.server is None:
            continue
        check_key(model.name, model.server)
        for number, worker in enumerate(_process_names(model)):
            port, name = checked_port("", LOOPBACK, 0, taken), f"{REMOTE}-{worker}"
            planned.append(RemoteConfig(name, model.name, number, port, state.config))
    return tuple(planned)


def _worker_ports(settings: Settings, taken: set[int]) -> Iterator[int]:
    """From `triton.port` on; free ones when it is 0."""
    first = settings.triton.port
    for port in itertools.count(first) if first else itertools.repeat(0):
        yield checked_port("triton.port", LOOPBACK, port, taken)


def _check_external(key: str, *urls: str) -> None:
    """One of several servers is enough."""
    addresses = [url.rpartition("://")[2].rpartition("@")[2].rstrip("/") for url in urls]
    hosts = [split_address(address, key) for address in addresses]
    if not any(answers(host, port, EXTERNAL_BOUND_S) for host, port in hosts):
        where = ", ".join(addresses)
        raise SetupError(f"{key}: nothing answers at {where}; start it, or remove {key}")


def _resolve(
    settings: Settings,
    gateways: tuple[ServerConfig, ...],
    jobs: tuple[ServerConfig, ...],
    batcher_page: str | None,
    nats_config: NatsConfig | None,
    workers: Sequence[tuple[str, str]],
) -> Settings:
    """``workers``: each model's name with the address of one of its workers."""
    first = gateways[0]
    pages = {"gateway": first.page, "batcher": batcher_page}
    pages["jobs"] = jobs[0].page if jobs else None
    update: dict[str, object] = {
        "gateway": settings.gateway.model_copy(update={"address": first.address}),
        "http": settings.http.model_copy(update={"address": first.http}),
        "telemetry": settings.telemetry.model_copy(
            update={"prometheus": settings.telemetry.prometheus.model_copy(update=pages)}
        ),
        "models": tuple(_served_by(model, workers) for model in settings.models),
    }
    if jobs:
        update["jobs"] = settings.jobs.model_copy(
            update={
                "address": ",".join(one.address for one in jobs),
                "gateways": ",".join(one.address for one in gateways),
            }
        )
    if nats_config is not None:
        update["nats"] = settings.nats.model_copy(
            update={"url": nats_config.url, "port": nats_config.port}
        )
    return settings.model_copy(update=update)


def _served_by(model: ModelSettings, workers: Sequence[tuple[str, str]]) -> ModelSettings:
    """``model`` with the addresses of its workers, when the mesh serves it."""
    addresses = tuple(address for name, address in workers if name == model.name)
    return at_addresses(model, addresses) if addresses else model


def at_addresses(model: ModelSettings, addresses: tuple[str, ...]) -> ModelSettings:
    """``model`` with one worker at each of ``addresses``."""
    return model.model_copy(update={"triton_url": addresses, "replicas": 1})


def _python_spec(module: str, state: StateDir, port: int | None, drain_s: float) -> ChildSpec:
    return ChildSpec(
        name=module,
        argv=module_command(module, state.config),
        env=child_environment(),
        log=state.log(module),
        port=port,
        stop_s=drain_s + _MARGIN_S,
        stage=_STAGES[module],
    )
