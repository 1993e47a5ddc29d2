"""Every fault: its name, what happens, what the mesh needs for it. A fault is a function that returns when it is over.

Another one is a function here and an entry in `FAULTS`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Final

from sluice.startup import LOOPBACK
from sluice.wire.subjects import RECORDS_STREAM
from tests.robustness.faults.callers import PlainCaller, Question
from tests.robustness.faults.mesh import (
    BATCHER_NATS,
    GATEWAY_NATS,
    LINKS,
    POISON_SEED,
    ROUTES,
    FaultMesh,
    Topology,
)
from tests.robustness.faults.results import Call, Tally
from tests.support.proxy import Proxy

HOLD_S: Final = 8.0
"""How long a process is stopped, a link cut or slow, the disk full, a clock wrong."""
DELAY_S: Final = 0.2
CLOCK_S: Final = 3600.0
RESTART_S: Final = 60.0
SETTLE_S: Final = 3.0
"""What others may take to notice that a process is back, before the next one is restarted."""
DISK_MIB: Final = 96
BULK_EVERY_S: Final = 0.2
BULK_BOUND_S: Final = 15.0
READERS: Final = 64
POISON_BOUND_S: Final = 60.0

Strike = Callable[[FaultMesh], Awaitable[None]]
Needs = Callable[[Topology], Topology]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        about: what happens, for people.
        strike: does it; returns when it is over.
        needs: what the mesh must have beyond what was asked for.
    """

    about: str
    strike: Strike
    needs: Needs = lambda topology: topology


async def kill(kind: str, mesh: FaultMesh) -> None:
    """The next process of a kind ends without a word."""
    mesh.kill(kind)


async def kill_any(mesh: FaultMesh) -> None:
    """A process of each kind but NATS, which a single server cannot survive, one after the other."""
    mesh.kill(mesh.next_of("worker", "batcher", "gateway", "triton"))


async def stop(kind: str, mesh: FaultMesh) -> None:
    """The next process of a kind stands still and then goes on."""
    await mesh.stop(kind, HOLD_S)


async def restart_all(mesh: FaultMesh) -> None:
    """Every batcher, gateway and Triton drains, ends and comes back, one after the other."""
    for kind in ("batcher", "gateway", "triton"):
        for name in mesh.names[kind]:
            await mesh.restart(name, RESTART_S)
            await mesh.all_serving(RESTART_S)
            await asyncio.sleep(SETTLE_S)


async def during(
    mesh: FaultMesh, proxies: Iterable[Proxy], change: Callable[[Proxy], None]
) -> None:
    """Changes some links for a while."""
    try:
        for proxy in proxies:
            change(proxy)
        await asyncio.sleep(HOLD_S)
    finally:
        for link in mesh.links:
            link.proxy.heal()


async def cut(kind: str, mesh: FaultMesh) -> None:
    """Nothing goes through the links of a kind."""
    await during(mesh, mesh.proxies(kind), Proxy.cut)


async def cut_and_kill(mesh: FaultMesh) -> None:
    """Nothing goes through the links between gateways and NATS, and meanwhile a worker ends."""

    async def kill_soon() -> None:
        await asyncio.sleep(SETTLE_S)
        mesh.kill("worker")

    await asyncio.gather(cut(GATEWAY_NATS, mesh), kill_soon())


async def slow(kind: str, mesh: FaultMesh) -> None:
    """Everything takes longer on the links of a kind."""
    await during(mesh, mesh.proxies(kind), lambda proxy: proxy.slow(DELAY_S))


async def reset(kind: str, mesh: FaultMesh) -> None:
    """All connections of a kind end at once."""
    for proxy in mesh.proxies(kind):
        proxy.reset()


async def kill_leader(mesh: FaultMesh) -> None:
    """The leader of the records ends."""
    mesh.kill("nats", await mesh.nats_leader(RECORDS_STREAM))


async def stop_leader(mesh: FaultMesh) -> None:
    """The leader of the records stands still."""
    await mesh.stop("nats", HOLD_S, await mesh.nats_leader(RECORDS_STREAM))


async def step_leader_down(mesh: FaultMesh) -> None:
    """The records get another leader."""
    await mesh.step_down(RECORDS_STREAM)


async def cut_leader_off(mesh: FaultMesh) -> None:
    """The leader reaches nobody, and nobody reaches it."""
    leader = await mesh.nats_leader(RECORDS_STREAM)
    await during(mesh, mesh.proxies_of(leader), Proxy.cut)


async def fill_disk(mesh: FaultMesh) -> None:
    """The disk of JetStream is full, and then it is not."""
    ballast = mesh.fill_disk()
    try:
        await ask_bulk(mesh)
    finally:
        ballast.unlink()


async def stall_disk(mesh: FaultMesh) -> None:
    """Whoever writes to the disk of JetStream waits, and then goes on."""
    await mesh.freeze_disk()
    try:
        await ask_bulk(mesh)
    finally:
        await mesh.thaw_disk()


async def lose_quorum(mesh: FaultMesh) -> None:
    """Two of three NATS servers stand still: the third stores nothing alone."""
    stops = (mesh.stop("nats", HOLD_S, name) for name in mesh.names["nats"][1:])
    await asyncio.gather(ask_bulk(mesh), *stops)


async def ask_bulk(mesh: FaultMesh) -> None:
    """Bulk calls for `HOLD_S`: a note says how they ended."""
    ends: Counter[str] = Counter()
    longest_s, until = 0.0, time.monotonic() + HOLD_S
    while time.monotonic() < until:
        call = await ask(mesh, BULK_BOUND_S, priority="bulk")
        longest_s = max(longest_s, call.last - call.begun)
        ends[call.failure or "answered"] += 1
        await asyncio.sleep(BULK_EVERY_S)
    mesh.notes.append(f"bulk calls: {dict(ends)}, the longest {longest_s:.1f} s")


async def ask(mesh: FaultMesh, limit_s: float, **options: Any) -> Call:
    """One more call, with other options."""
    asked, caller = mesh.questions[0], PlainCaller(mesh.addresses, limit_s)
    changed: Any = {**asked.options, **options}
    try:
        return await caller.ask(0, Question(asked.prompt, changed), Tally(0.0))
    finally:
        await caller.close()


async def jump(kind: str, mesh: FaultMesh) -> None:
    """The wall clock of a process goes an hour ahead, and back."""
    name = mesh.victim(kind)
    mesh.set_clock(name, CLOCK_S)
    try:
        await asyncio.sleep(HOLD_S)
    finally:
        mesh.set_clock(name, 0)


async def read_slowly(mesh: FaultMesh) -> None:
    """Callers that begin to read and then do not go on."""

    async def read(question: Question) -> None:
        caller = PlainCaller(mesh.addresses, limit_s=60.0)
        stream = caller.open(question)
        try:
            await stream.read()
            await asyncio.sleep(HOLD_S)
        finally:
            stream.cancel()
            await caller.close()

    await asyncio.gather(*(read(each) for each in _crowd(mesh)), return_exceptions=True)


async def vanish(mesh: FaultMesh) -> None:
    """Callers that are gone without a word to TCP: their connections stay open and silent for good."""
    assert mesh.vanishing is not None
    mesh.vanishing.heal()
    address = f"{LOOPBACK}:{mesh.vanishing.port}"
    callers = [PlainCaller([address], limit_s=60.0) for _ in range(READERS)]
    calls = [
        asyncio.ensure_future(caller.ask(0, question, Tally(0.0)))
        for caller, question in zip(callers, _crowd(mesh), strict=True)
    ]
    await asyncio.sleep(0.1)
    mesh.vanishing.cut()
    await asyncio.sleep(HOLD_S)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.gather(*(caller.close() for caller in callers))


def _crowd(mesh: FaultMesh) -> list[Question]:
    return [question for question, _ in zip(cycle(mesh.questions), range(READERS), strict=False)]


async def poison(mesh: FaultMesh) -> None:
    """A request that kills every worker that takes it. Returns when its caller has been told."""
    call = await ask(mesh, POISON_BOUND_S, seed=POISON_SEED)
    mesh.notes.append(f"poison: {call.failure} after {call.last - call.begun:.1f} s")


async def starve(mesh: FaultMesh) -> None:
    """The engine gets no more memory for a while."""
    pid = mesh.starve("worker")
    try:
        await asyncio.sleep(HOLD_S)
    finally:
        mesh.feed(pid)


def _links(*kinds: str) -> Needs:
    return lambda topology: replace(topology, proxied=topology.proxied | set(kinds))


def _cluster(*kinds: str) -> Needs:
    return lambda topology: replace(topology, nats=3, proxied=topology.proxied | set(kinds))


def _disk(topology: Topology) -> Topology:
    return replace(topology, disk_mib=DISK_MIB)


def _jobs(topology: Topology) -> Topology:
    return replace(topology, jobs=max(1, topology.jobs))


_PROCESSES: Final = {
    "worker": "the Python process of the model",
    "triton": "tritonserver",
    "batcher": "the batcher",
    "gateway": "the gateway",
    "nats": "nats-server",
}

FAULTS: Final[dict[str, Fault]] = {
    **{f"{k}-kill": Fault(f"{what} is killed", partial(kill, k)) for k, what in _PROCESSES.items()},
    **{
        f"{k}-stop": Fault(f"{what} is stopped for {HOLD_S:g} s", partial(stop, k))
        for k, what in _PROCESSES.items()
    },
    "jobs-kill": Fault("the process of jobs is killed", partial(kill, "jobs"), _jobs),
    "any-kill": Fault("any process but NATS is killed, each in turn", kill_any),
    "rolling-restart": Fault("batchers, gateways, Tritons are restarted in turn", restart_all),
    "leader-kill": Fault("the leader of three NATS servers is killed", kill_leader, _cluster()),
    "leader-stop": Fault(
        f"the leader of three is stopped for {HOLD_S:g} s", stop_leader, _cluster()
    ),
    "leader-stepdown": Fault("the leader of three steps down", step_leader_down, _cluster()),
    "leader-cut": Fault(
        f"the leader of three is cut off for {HOLD_S:g} s",
        cut_leader_off,
        _cluster(ROUTES, GATEWAY_NATS, BATCHER_NATS),
    ),
    **{
        f"{link}-drop": Fault(
            f"nothing goes through {link} for {HOLD_S:g} s", partial(cut, link), _links(link)
        )
        for link in LINKS
    },
    "gateway-nats-drop-worker-kill": Fault(
        f"nothing goes through {GATEWAY_NATS} for {HOLD_S:g} s, and a worker is killed meanwhile",
        cut_and_kill,
        _links(GATEWAY_NATS),
    ),
    **{
        f"{link}-delay": Fault(
            f"{link} is {DELAY_S * 1000:g} ms slower each way for {HOLD_S:g} s",
            partial(slow, link),
            _links(link),
        )
        for link in LINKS
    },
    **{
        f"{link}-reset": Fault(
            f"all connections of {link} are reset", partial(reset, link), _links(link)
        )
        for link in LINKS
    },
    "disk-full": Fault(f"the disk of JetStream is full for {HOLD_S:g} s", fill_disk, _disk),
    "disk-stall": Fault(
        f"the disk of JetStream writes nothing for {HOLD_S:g} s", stall_disk, _disk
    ),
    "no-quorum": Fault(
        f"two of three NATS servers are stopped for {HOLD_S:g} s", lose_quorum, _cluster()
    ),
    **{
        f"{kind}-clock": Fault(
            f"the clock of the {kind} is an hour ahead for {HOLD_S:g} s",
            partial(jump, kind),
            lambda topology: replace(topology, clocks=True),
        )
        for kind in ("batcher", "gateway")
    },
    "slow-readers": Fault(f"{READERS} more callers stop reading for {HOLD_S:g} s", read_slowly),
    "vanished-readers": Fault(f"{READERS} more callers vanish without closing", vanish),
    "poison": Fault(
        "a request that kills each worker that takes it",
        poison,
        lambda topology: replace(topology, poison=True),
    ),
    "no-memory": Fault(f"the engine gets no more memory for {HOLD_S:g} s", starve),
}
