"""A mesh to break: its processes are those of `sluice up`, started and restarted by the same supervisor.

But there may be several of each, each with a configuration of its own, so that a proxy stands between any two of them.

Processes are named "nats", "triton", "batcher", "gateway", "jobs", and with a number from the second on ("gateway.1").
"""

import asyncio
import os
import resource
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

import nats
import psutil

from sluice.settings import Settings
from sluice.startup import LOOPBACK
from supervisor.health import wait_until_serving
from supervisor.model_processes import stub_pids
from supervisor.supervisor import Supervisor
from supervisor.triton import wait_for_triton
from tests.robustness.faults.callers import Question, questions
from tests.support.proxy import Proxy

CLIENT_GATEWAY: Final = "client-gateway"
GATEWAY_NATS: Final = "gateway-nats"
BATCHER_NATS: Final = "batcher-nats"
BATCHER_TRITON: Final = "batcher-triton"
LINKS: Final = (CLIENT_GATEWAY, GATEWAY_NATS, BATCHER_NATS, BATCHER_TRITON)
ROUTES: Final = "nats-nats"
"""The routes between the servers of a cluster."""

START_S: Final = 240.0
ECHO_TOKENS: Final = 8
POISON_SEED: Final = 666_666
_DISK_FILE_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class Topology:
    """What a mesh consists of.

    Attributes:
        workers: each in a Triton of its own.
        standby: how many of the workers only take the place of lost ones.
        nats: servers; three form a cluster.
        proxied: links that go through a proxy.
        disk_mib: size of a file system of its own that JetStream stores on; None: an ordinary folder.
        clocks: whether the clocks of batchers and gateways can be set.
        poison: whether the model is an echo whose worker dies of a request with the seed `POISON_SEED`.
        jobs: processes that run jobs.
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
    jobs: int = 0


@dataclass(frozen=True)
class ProxiedLink:
    """A proxy between two processes; callers are "client"."""

    kind: str
    source: str
    target: str
    proxy: Proxy


class Missing(Exception):
    """This machine lacks what a fault needs; the message says what."""


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
        if name in self.names["triton"]:
            port = self.supervisor.process(name).spec.port
            await wait_for_triton(f"{LOOPBACK}:{port}", bound_s)

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

    async def freeze_disk(self) -> None:
        """Writes to the file system of JetStream wait until `thaw_disk`, as on a disk that does not answer."""
        await self._fsfreeze("--freeze")

    async def thaw_disk(self) -> None:
        """They go on."""
        await self._fsfreeze("--unfreeze")

    async def _fsfreeze(self, how: str) -> None:
        # Not in this thread: it waits for writes that have begun.
        await asyncio.to_thread(subprocess.run, ("fsfreeze", how, self.root / "disk"), check=True)

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
