"""A mesh to break: its processes are those of `sluice up`, started and restarted by the same supervisor.

But there may be several of each, each with a configuration of its own, so that a proxy stands between any two of them.

Processes are named "nats", "triton", "batcher", "gateway", and with a number from the second on ("gateway.1").
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

import nats
import psutil

from bench.faults.callers import Question, questions
from bench.faults.proxy import Proxy
from model_workers.deploy import render_repository
from sluice.settings import ModelSettings, Settings
from sluice.startup import LOOPBACK, child_environment, free_port, module_command
from supervisor.child import ChildSpec
from supervisor.mesh import triton_watcher, wait_until_serving
from supervisor.nats import NatsConfig, nats_command, wait_for_nats
from supervisor.plan import plan_triton, triton_spec
from supervisor.supervisor import Supervisor
from supervisor.triton_stubs import stub_pids

CLIENT_GATEWAY: Final = "client-gateway"
GATEWAY_NATS: Final = "gateway-nats"
BATCHER_NATS: Final = "batcher-nats"
BATCHER_TRITON: Final = "batcher-triton"
LINKS: Final = (CLIENT_GATEWAY, GATEWAY_NATS, BATCHER_NATS, BATCHER_TRITON)
ROUTES: Final = "nats-nats"
"""The routes between the servers of a cluster."""

START_S: Final = 60.0
_STOP_MARGIN_S: Final = 3.0
_FAKETIME: Final = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
)
ECHO_TOKENS: Final = 8
_DISK_FILE_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class Topology:
    """What a mesh consists of.

    Attributes:
        workers: each in a Triton of its own.
        standby: how many of the workers only take the place of lost ones.
        nats: servers; three form a cluster.
        proxied: links that go through a proxy.
        disk_mib: size of the file system that JetStream stores on; None: an ordinary folder.
        clocks: whether the clocks of batchers and gateways can be set.
        poison: whether the model is an echo whose worker dies of a request with the seed `POISON_SEED`.
    """

    gateways: int = 1
    batchers: int = 1
    workers: int = 1
    standby: int = 0
    nats: int = 1
    proxied: frozenset[str] = frozenset()
    disk_mib: int | None = None
    clocks: bool = False
    poison: bool = False


@dataclass(frozen=True)
class ProxiedLink:
    """A proxy between two processes; callers are "client"."""

    kind: str
    source: str
    target: str
    proxy: Proxy


class Missing(Exception):
    """This machine lacks what a fault needs; the message says what."""


POISON_SEED: Final = 666_666
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


@dataclass
class FaultMesh:
    """A running mesh and what can be done to it.

    Attributes:
        addresses: of the gateways, as callers reach them.
        vanishing: another way to the first gateway, through a proxy of its own.
        links: those that go through a proxy.
        root: folder of all files and logs.
        names: of the processes, by kind.
        notes: what faults have to say, for people.
    """

    settings: Settings
    topology: Topology
    supervisor: Supervisor
    root: Path
    addresses: list[str] = field(default_factory=list)
    nats_urls: list[str] = field(default_factory=list)
    links: list[ProxiedLink] = field(default_factory=list)
    vanishing: Proxy | None = None
    names: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _turns: dict[str, "cycle[str]"] = field(default_factory=dict)

    @property
    def questions(self) -> list[Question]:
        """What callers ask it. Echoes are short: a poisoned request is one of ten thousand."""
        model = self.settings.models[0].name
        return questions(model, ECHO_TOKENS) if self.topology.poison else questions(model)

    def victim(self, kind: str) -> str:
        """The next process of a kind, each in turn; "worker" is the Python process of the model in a Triton."""
        return self.next_of(*self.names["triton" if kind == "worker" else kind], of=kind)

    def next_of(self, *names: str, of: str = "") -> str:
        """The next of ``names``, each in turn; ``of`` names the turns."""
        return next(self._turns.setdefault(of, cycle(names)))

    def pid(self, kind: str, name: str) -> int | None:
        """Of a process; None when it does not run now."""
        pid = self.supervisor.pids.get(name)
        if kind != "worker" or pid is None:
            return pid
        return next(iter(stub_pids(pid).values()), None)

    def kill(self, kind: str, name: str | None = None) -> None:
        """Kills the next process of a kind, or that of ``name``."""
        self._send(kind, name or self.victim(kind), signal.SIGKILL)

    async def stop(self, kind: str, seconds: float, name: str | None = None) -> None:
        """Stops the next process of a kind (or that of ``name``) for a while; what has replaced it is left alone."""
        pid = self._send(kind, name or self.victim(kind), signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            _signal(pid, signal.SIGCONT)

    def _send(self, kind: str, name: str, sent: signal.Signals) -> int | None:
        """Returns the pid; a process that is being restarted gets nothing, and a note says so."""
        pid = self.pid(kind, name)
        if pid is None:
            self.notes.append(f"{name} did not run: no {sent.name}")
        _signal(pid, sent)
        return pid

    async def restart(self, name: str, bound_s: float) -> None:
        """SIGTERM; returns when the process has drained and runs again."""
        before = self._send("", name, signal.SIGTERM)
        await self.supervisor.wait_for(
            lambda: self.supervisor.pids.get(name) not in (None, before), bound_s
        )

    def starve(self, kind: str) -> int | None:
        """Lets a process get no more memory; returns its pid for `feed`."""
        pid = self.pid(kind, self.victim(kind))
        if pid is not None:
            used = psutil.Process(pid).memory_info().vms
            _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (used // 2, hard))
        return pid

    def feed(self, pid: int | None) -> None:
        """Lets it have memory again."""
        if pid is not None:
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
                resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))

    def fill_disk(self) -> Path:
        """Writes until the file system of JetStream is full; remove the file to make room again."""
        ballast = self.root / "disk" / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(_DISK_FILE_BYTES))
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(512))
        return ballast

    def proxies(self, kind: str) -> list[Proxy]:
        """Of all links of a kind."""
        return [link.proxy for link in self.links if link.kind == kind]

    def proxies_of(self, name: str) -> list[Proxy]:
        """Of all links from or to a process."""
        return [link.proxy for link in self.links if name in (link.source, link.target)]

    def set_clock(self, name: str, ahead_s: float) -> None:
        """Moves the wall clock of a process; its monotonic clock goes on."""
        draft = self.root / f"clock-{name}.new"
        draft.write_text(f"{ahead_s:+.0f}")
        draft.replace(self.root / f"clock-{name}")

    async def nats_leader(self, stream: str) -> str:
        """Which process leads a replicated stream."""
        client = await nats.connect(self.nats_urls)
        try:
            info = await client.jetstream().stream_info(stream)
        finally:
            await client.close()
        leader = info.cluster.leader if info.cluster is not None else None
        return leader or self.names["nats"][0]

    async def step_down(self, stream: str) -> None:
        """Has the cluster choose another leader of a stream."""
        client = await nats.connect(self.nats_urls)
        try:
            await client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}", b"", timeout=5)
        finally:
            await client.close()

    async def all_serving(self, bound_s: float) -> None:
        """Returns when every gateway serves the model; SetupError when one does not in time."""
        models = [self.settings.models[0].name]
        waits = (wait_until_serving(address, models, bound_s) for address in self.addresses)
        await asyncio.gather(*waits)


def _signal(pid: int | None, sent: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, sent)


@asynccontextmanager
async def fault_mesh(topology: Topology, root: Path) -> AsyncIterator[FaultMesh]:
    """A mesh that is ready when the block begins; its files and logs stay in ``root``.

    Raises:
        Missing: this machine lacks something.
        SetupError: a process did not start.
    """
    async with AsyncExitStack() as stack:
        mesh = FaultMesh(mesh_settings(topology), topology, Supervisor(), root)
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
    for name, port in gateways.items():
        urls = _urls(await _through(mesh, stack, GATEWAY_NATS, name, servers))
        _start_python(mesh, name, "gateway", urls, list(tritons.values()), port)
    outside = await _through(mesh, stack, CLIENT_GATEWAY, "client", gateways)
    mesh.addresses = [f"{LOOPBACK}:{port}" for port in outside]
    mesh.vanishing = await stack.enter_async_context(Proxy(gateways["gateway"], free_port()))
    await mesh.supervisor.during_start(mesh.all_serving(START_S))


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
        stack.callback(mount_tmpfs(disk, mesh.topology.disk_mib))
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
    """A batcher or a gateway with a configuration of its own."""
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
        update["gateway"] = settings.gateway.model_copy(update={"address": f"{LOOPBACK}:{port}"})
    path = mesh.root / f"{name}.yaml"
    path.write_text(settings.model_copy(update=update).to_yaml(), encoding="utf-8")
    log = mesh.root / "logs" / f"{name}.log"
    stop_s = settings.gateway.drain_s + _STOP_MARGIN_S
    environment = {**child_environment(), **_clock_environment(mesh, name)}
    command = module_command(module, path)
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


def mount_tmpfs(folder: Path, mib: int) -> "Unmount":
    """A file system of ``mib`` in memory at ``folder``.

    Raises:
        Missing: this user may not mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ("mount", "-t", "tmpfs", "-o", f"size={mib}m", "sluice-faults", str(folder))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"a small file system needs the right to mount: {done.stderr.strip()}")
    return Unmount(folder)


@dataclass(frozen=True)
class Unmount:
    """Takes a file system away."""

    folder: Path

    def __call__(self) -> None:
        # Lazily: a server that still ends may have files open.
        subprocess.run(("umount", "-l", str(self.folder)), check=False)
