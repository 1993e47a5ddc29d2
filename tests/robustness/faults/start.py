"""Starts a `FaultMesh`: NATS first, then Tritons, batchers, gateways, each with its own configuration and log."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from model_workers.deploy import render_repository
from sluice.settings import ModelSettings, Settings
from sluice.startup import LOOPBACK, child_environment, free_port, module_command
from supervisor.child import ChildSpec
from supervisor.model_processes import triton_watcher
from supervisor.nats import NatsConfig, nats_command, wait_for_nats
from supervisor.plan import plan_triton
from supervisor.specs import triton_spec
from supervisor.supervisor import Supervisor
from tests.robustness.faults.mesh import (
    BATCHER_NATS,
    BATCHER_TRITON,
    CLIENT_GATEWAY,
    GATEWAY_NATS,
    POISON_SEED,
    ROUTES,
    START_S,
    FaultMesh,
    Missing,
    ProxiedLink,
    Topology,
)
from tests.support.proxy import Proxy

_STOP_MARGIN_S: Final = 3.0
_FAKETIME: Final = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
)
_POISONED_MODEL: Final = f'''\
"""An echo model whose process dies in the step after it took a request with one seed: only benchmarks have it."""

import os
import signal

from model_workers import process
from model_workers.engine.cacheless import EchoEngine


class PoisonedEcho(EchoEngine):
    def add(self, row, now):
        super().add(row, now)
        self.poisoned = getattr(self, "poisoned", False) or row.sampling.seed == {POISON_SEED}

    def step(self, now):
        if getattr(self, "poisoned", False):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(now)


process.EchoEngine = PoisonedEcho

from model_workers.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@asynccontextmanager
async def fault_mesh(
    topology: Topology, root: Path, settings: Settings | None = None
) -> AsyncIterator[FaultMesh]:
    """A mesh that is ready when the block begins; its files and logs stay in ``root``.

    ``settings``: None: those of `mesh_settings`.

    Raises:
        Missing: this machine lacks something.
        SetupError: a process did not start.
    """
    async with AsyncExitStack() as stack:
        mesh = FaultMesh(settings or mesh_settings(topology), topology, Supervisor(), root)
        (root / "logs").mkdir(parents=True, exist_ok=True)
        try:
            await _start(mesh, stack)
            yield mesh
        finally:
            await mesh.supervisor.stop()


def mesh_settings(topology: Topology) -> Settings:
    """The small tier, or the echo that can be poisoned."""
    model = ModelSettings(name="small", tier="small", path="builtin:small", slots=32)
    if topology.poison:
        model = model.model_copy(update={"engine": "echo"})
    return Settings.model_validate(
        {
            "models": [model.model_dump()],
            "routing": {"default": "small"},
            "gateway": {"address": f"{LOOPBACK}:0", "drain_s": 5.0},
            "batcher": {"drain_s": 5.0},
        }
    )


Ports = Mapping[str, int]
"""Where the processes of a kind listen, by name."""


async def _start(mesh: FaultMesh, stack: AsyncExitStack) -> None:
    topology = mesh.topology
    servers = await _start_nats(mesh, stack)
    mesh.nats_urls = _urls(list(servers.values()))
    tritons = {name: _start_triton(mesh, name) for name in _names(mesh, "triton", topology.workers)}
    for name in _names(mesh, "batcher", topology.batchers):
        urls = _urls(await _through(mesh, stack, BATCHER_NATS, name, servers))
        workers = await _through(mesh, stack, BATCHER_TRITON, name, tritons)
        _start_python(mesh, name, "batcher", urls, workers)
    gateways = {name: free_port() for name in _names(mesh, "gateway", topology.gateways)}
    jobs = {name: free_port() for name in _names(mesh, "jobs", topology.jobs)}
    mesh.settings = _with_jobs(mesh.settings, list(gateways.values()), list(jobs.values()))
    for name, port in gateways.items():
        urls = _urls(await _through(mesh, stack, GATEWAY_NATS, name, servers))
        _start_python(mesh, name, "gateway", urls, list(tritons.values()), port)
    for name, port in jobs.items():
        _start_python(mesh, name, "jobs", mesh.nats_urls, list(tritons.values()), port)
    outside = await _through(mesh, stack, CLIENT_GATEWAY, "client", gateways)
    mesh.addresses = [f"{LOOPBACK}:{port}" for port in outside]
    mesh.vanishing = await stack.enter_async_context(Proxy(gateways["gateway"], free_port()))
    await mesh.supervisor.during_start(mesh.all_serving(START_S))


def _with_jobs(settings: Settings, gateways: list[int], jobs: list[int]) -> Settings:
    """Gateways and processes of jobs know each other."""
    if not jobs:
        return settings
    addresses = [",".join(f"{LOOPBACK}:{port}" for port in ports) for ports in (jobs, gateways)]
    update = {"address": addresses[0], "gateways": addresses[1]}
    return settings.model_copy(update={"jobs": settings.jobs.model_copy(update=update)})


def _names(mesh: FaultMesh, kind: str, count: int) -> list[str]:
    mesh.names[kind] = [kind if not number else f"{kind}.{number}" for number in range(count)]
    return mesh.names[kind]


def _urls(ports: list[int]) -> list[str]:
    return [f"nats://{LOOPBACK}:{port}" for port in ports]


async def _through(
    mesh: FaultMesh, stack: AsyncExitStack, kind: str, source: str, targets: Ports
) -> list[int]:
    """The ports of new proxies in front of ``targets``, or those of ``targets`` for a link that needs none."""
    if kind not in mesh.topology.proxied:
        return list(targets.values())
    made = []
    for target, port in targets.items():
        made.append(await stack.enter_async_context(Proxy(port, free_port())))
        mesh.links.append(ProxiedLink(kind, source, target, made[-1]))
    return [proxy.port for proxy in made]


async def _start_nats(mesh: FaultMesh, stack: AsyncExitStack) -> Ports:
    names, disk = _names(mesh, "nats", mesh.topology.nats), mesh.root / "disk"
    if mesh.topology.disk_mib is not None:
        mount_disk(disk, mesh.topology.disk_mib)
        # Lazily: a server that still ends may have files open.
        stack.callback(subprocess.run, ("umount", "-l", str(disk)), check=False)
    ports = {name: free_port() for name in names}
    routes = await _routes(mesh, stack, names) if len(names) > 1 else {}
    for name, port in ports.items():
        path = mesh.root / f"{name}.conf"
        command = nats_command(NatsConfig(port=port, store=disk / name), path)
        path.write_text(_nats_text(path.read_text(), name, routes.get(name, "")))
        log = mesh.root / "logs" / f"{name}.log"
        spec = ChildSpec(name, command, child_environment(), log, port, _STOP_MARGIN_S)
        mesh.supervisor.start(spec)
    waits = (wait_for_nats(url, START_S) for url in _urls(list(ports.values())))
    await mesh.supervisor.during_start(asyncio.gather(*waits))
    return ports


def _nats_text(text: str, name: str, routes: str) -> str:
    """A name of its own, and more storage than a small disk has: streams reserve their limits."""
    text = text.replace('server_name: "sluice"', f'server_name: "{name}"')
    return text.replace("jetstream {", "jetstream { max_file_store: 16GB, ") + routes


async def _routes(mesh: FaultMesh, stack: AsyncExitStack, names: list[str]) -> dict[str, str]:
    """What each configuration says of the cluster.

    Where routes are proxied, each server has proxies of its own to the others, and the address that servers tell of
    each other leads nowhere: so all links of one server can be cut.
    """
    ports, nowhere, texts = {name: free_port() for name in names}, free_port(), {}
    proxied = ROUTES in mesh.topology.proxied
    for name in names:
        others = {other: ports[other] for other in names if other != name}
        urls = ", ".join(map(json.dumps, _urls(await _through(mesh, stack, ROUTES, name, others))))
        advertise = f'advertise: "{LOOPBACK}:{nowhere}", ' if proxied else ""
        texts[name] = (
            f"cluster {{ name: sluice, host: {LOOPBACK}, port: {ports[name]}, {advertise}"
            f"no_advertise: true, routes: [{urls}] }}\n"
        )
    return texts


def _start_triton(mesh: FaultMesh, name: str) -> int:
    port, models = free_port(), mesh.settings.models[0].triton_models
    config = plan_triton(mesh.settings, mesh.root / name, name, models, LOOPBACK, port)
    render_repository(mesh.settings, config.repository)
    if mesh.topology.poison:
        for script in config.repository.glob("*/1/model.py"):
            script.write_text(_POISONED_MODEL, encoding="utf-8")
    spec = triton_spec(config, mesh.root / "logs" / f"{name}.log")
    mesh.supervisor.start(spec, triton_watcher(config, mesh.settings.triton.start_s))
    return port


def _start_python(
    mesh: FaultMesh,
    name: str,
    module: str,
    urls: list[str],
    tritons: list[int],
    port: int | None = None,
) -> None:
    """A batcher, a gateway or a process of jobs with a configuration of its own."""
    settings = mesh.settings
    workers = tuple(f"{LOOPBACK}:{triton}" for triton in tritons)
    update: dict[str, object] = {
        "nats": settings.nats.model_copy(
            update={"url": ",".join(urls), "replicas": mesh.topology.nats}
        ),
        "models": tuple(
            model.model_copy(update={"triton_url": workers, "standby": mesh.topology.standby})
            for model in settings.models
        ),
    }
    if port is not None:
        own = getattr(settings, module)
        update[module] = own.model_copy(update={"address": f"{LOOPBACK}:{port}"})
    path = mesh.root / f"{name}.yaml"
    path.write_text(settings.model_copy(update=update).to_yaml(), encoding="utf-8")
    log = mesh.root / "logs" / f"{name}.log"
    stop_s = settings.gateway.drain_s + _STOP_MARGIN_S
    environment = {**child_environment(), **_clock_environment(mesh, name)}
    command = module_command(module, path)
    if module == "jobs":
        command = (*command, "--id", name)
    mesh.supervisor.start(ChildSpec(name, command, environment, log, port, stop_s))


def _clock_environment(mesh: FaultMesh, name: str) -> Mapping[str, str]:
    """A process whose wall clock is the real one plus what its file says, read once a second."""
    if not mesh.topology.clocks:
        return {}
    mesh.set_clock(name, 0)
    return {
        "LD_PRELOAD": find_faketime(),
        "FAKETIME_TIMESTAMP_FILE": str(mesh.root / f"clock-{name}"),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def find_faketime() -> str:
    """libfaketime's library.

    Raises:
        Missing: it is not installed.
    """
    for path in _FAKETIME:
        if Path(path).is_file():
            return path
    raise Missing("libfaketime is not installed: apt-get install libfaketime")


def mount_disk(folder: Path, mib: int) -> None:
    """A file system of ``mib`` at ``folder``, in a file beside it.

    Raises:
        Missing: this user may not mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(mib * 1024 * 1024)
    # Without reserved blocks: the superuser could write when it is full.
    make = ("mkfs.ext4", "-q", "-m", "0", str(image))
    for command in (make, ("mount", "-o", "loop", str(image), str(folder))):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise Missing(f"{command[0]} is not installed") from error
        if done.returncode:
            raise Missing(f"a small file system needs the right to mount: {done.stderr.strip()}")
