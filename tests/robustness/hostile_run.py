"""An hour of hostile tenants beside a quiet one: what the quiet one notices, and what the mesh needs.

Definitions, fixed before the first run:

- The mesh: `sluice up`'s processes on one machine, one of each, one echo model (512 rows: the engine is not what is
  measured), API keys asked for, HTTP on, all limits as shipped; `jobs.private_hosts` lets webhooks reach this machine.
- The quiet tenant: interactive calls with answers of 4 tokens, `QUIET_PER_S` a second by Poisson arrivals, from a
  process of its own. The latency of a call goes from when it was due to the end of its answer; a call that failed
  counts as failed, and not as a latency.
- Hostile tenants: one for each kind of `tests.robustness.hostile.ATTACKS`, at its rate, from one process with nice 10.
- The run: cycles of `--cycle` minutes, a fifth of each alone and then four fifths beside the hostile ones. What was due
  in the first `SETTLE_S` of a part (a third of it where that is shorter) does not count. Hostile tenants delete their
  jobs at the end of their part.
- `abuse_quiet_p99`: the 99th percentile over all calls beside (ours) and alone (peer); bound: 1.5 times.
- `abuse_quiet_failed`: calls of the quiet tenant that failed or were refused; bound: 0.
- `abuse_memory_above_idle`: of the processes of the mesh that stay (with the model's own process), each by itself and
  sampled once a second, the most resident memory above what it had after `WARM_CALLS` calls and before the first part,
  MiB; bound: 300.
- `abuse_child_memory`: the most resident memory of a process that has limits of its own, MiB; bound: what
  docs/operate/security.md says of its kind.
- `abuse_ended`: processes of the mesh that ended; bound: 0. Those with limits of their own may be ended by them.
- `abuse_internal`: hostile calls that ended with INTERNAL or UNKNOWN; bound: 0.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import psutil

from bench.support.harness import MIN_RUNS, Figure, machine
from bench.support.meshes import echo, mesh_of, mesh_settings
from sluice.settings import HttpSettings, IdentitySettings, JobsSettings
from supervisor.mesh import Mesh
from tests.robustness.hostile import ATTACKS

QUIET: Final = "quiet"
SLOTS: Final = 512
"""With 64, on a machine that others kept busy, long answers of slow readers filled all of them."""
QUIET_PER_S: Final = 10.0
ALONE_SHARE: Final = 0.2
SETTLE_S: Final = 10.0
WARM_CALLS: Final = 50
KNOWN_S: Final = 5.0
"""Gateways know a new key after this time, seconds."""
END_S: Final = 90.0
"""What hostile tenants may take to delete their jobs, seconds."""
LIMITED: Final = ("constraint_child", "parquet_child")
"""Processes that have limits of their own, by their module."""


SETTINGS: Final = mesh_settings(
    echo(SLOTS),
    http=HttpSettings(address="127.0.0.1:0"),
    identity=IdentitySettings(api_keys=True),
    jobs=JobsSettings(private_hosts=["127.0.0.1"]),
)


@dataclass
class Processes:
    """Resident memory of the processes of a mesh, by name, MiB; a child is named behind its parent.

    Attributes:
        idle: at the begin.
        highest: since then.
        ended: which of those that stay have ended.
    """

    mesh: Mesh
    idle: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    _known: dict[int, str] = field(default_factory=dict)

    def sample(self) -> dict[str, float]:
        """The memory of now; of several of one name that of the largest."""
        found: dict[str, float] = {}
        alive: dict[int, str] = {}
        for root in self.mesh.state.processes:
            for one in family(root.pid):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    name = root.name if one.pid == root.pid else f"{root.name}/{_module(one)}"
                    name = alive[one.pid] = self._known.get(one.pid, name)
                    size = one.memory_info().rss / (1 << 20)
                    found[name] = max(size, found.get(name, 0.0))
        gone = [name for pid, name in self._known.items() if pid not in alive]
        self.ended += [name for name in gone if name.rpartition("/")[2] not in LIMITED]
        self._known = alive
        return found

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """What is there now is idle; take a sample each second while the block runs."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(1.0)
                for name, size in self.sample().items():
                    self.highest[name] = max(size, self.highest.get(name, 0.0))

        self.idle = self.sample()
        watching = asyncio.create_task(watch())
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    def above_idle(self) -> dict[str, float]:
        """Of the processes that stay, MiB."""
        return {name: self.highest.get(name, 0.0) - idle for name, idle in self.idle.items()}

    def limited(self) -> dict[str, float]:
        """Of those with limits of their own, by module, MiB."""
        found = [(name.rpartition("/")[2], size) for name, size in sorted(self.highest.items())]
        return {module: size for module, size in found if module in LIMITED}


def family(pid: int | None) -> list[psutil.Process]:
    """A process with all its children; none while it does not run.

    A child that has not replaced its program yet is left out: it looks like a second process of its parent.
    """
    if pid is None or not psutil.pid_exists(pid):
        return []
    parent = psutil.Process(pid)
    command, family = parent.cmdline(), [parent]
    for child in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            family += [child] if child.cmdline() != command else []
    return family


def _module(process: psutil.Process) -> str:
    words = process.cmdline()
    named = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
    return named.rpartition(".")[2]


async def _keys(tenants: Sequence[str], state: Path) -> dict[str, str]:
    """A new API key for each."""
    places = asyncio.Semaphore(2)

    async def made(tenant: str) -> str:
        async with places:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "cli", "keys", "create", tenant, "--json"),
                *("--state-dir", str(state)),
                stdout=asyncio.subprocess.PIPE,
            )
            said, _ = await process.communicate()
        return str(json.loads(said)["key"])

    return dict(zip(tenants, await asyncio.gather(*map(made, tenants)), strict=True))


@dataclass
class Part:
    """Of a run: from when to when calls count, and whether the tenant is "alone" or has others "beside" it."""

    kind: str
    begin: float
    end: float


async def start_beside(module: str, *words: str) -> asyncio.subprocess.Process:
    """Start a module of this package in a session of its own: the kernel may share cores by session."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"tests.robustness.{module}", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 30,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        start_new_session=True,
    )


async def read_json(process: asyncio.subprocess.Process) -> Any:
    """Return what a process prints until its end."""
    assert process.stdout is not None, "piped"
    async with asyncio.timeout(END_S):
        return json.loads(await process.stdout.read())


async def _parts(
    mesh: Mesh, keys: Mapping[str, str], minutes: float, cycle: float
) -> tuple[list[Part], Counter[str]]:
    """The whole run: its parts, and how hostile calls ended."""
    parts, ends = [], Counter[str]()
    cycles = max(1, round(minutes / cycle))
    whole_s = 60 * minutes / cycles
    seconds_of = {"alone": ALONE_SHARE * whole_s, "beside": (1 - ALONE_SHARE) * whole_s}
    for _ in range(cycles):
        for kind, seconds in seconds_of.items():
            begin = time.monotonic()
            settle_s = min(SETTLE_S, seconds / 3)
            parts.append(Part(kind, begin + settle_s, begin + seconds))
            if kind == "alone":
                await asyncio.sleep(seconds)
                continue
            assert mesh.http is not None
            attackers = await start_beside("hostile", mesh.address, mesh.http, str(seconds))
            assert attackers.stdin is not None
            attackers.stdin.write(json.dumps(dict(keys)).encode() + b"\n")
            await asyncio.sleep(seconds)
            for attack, found in (await read_json(attackers)).items():
                ends.update({f"{attack} {code}": count for code, count in found.items()})
            await attackers.wait()
    return parts, ends


async def hostile(minutes: float, cycle: float) -> list[Figure]:
    """Runs a mesh, its quiet tenant and its hostile ones."""
    async with mesh_of(SETTINGS) as mesh:
        keys = await _keys((QUIET, *ATTACKS), mesh.state_dir.root)
        await asyncio.sleep(KNOWN_S)
        quiet = await start_beside("quiet_caller", mesh.address, str(QUIET_PER_S))
        assert quiet.stdin is not None
        quiet.stdin.write(keys.pop(QUIET).encode() + b"\n")
        await asyncio.sleep(WARM_CALLS / QUIET_PER_S)
        processes = Processes(mesh)
        async with processes.watched():
            parts, ends = await _parts(mesh, keys, minutes, cycle)
        quiet.stdin.close()
        calls = await read_json(quiet)
        restarts = sum(one.restarts for one in mesh.state.processes)
    return _figures(parts, calls, processes, ends, restarts)


def _p99(waits: Sequence[float]) -> float:
    return quantiles(waits, n=100)[98]


def _figures(
    parts: Sequence[Part],
    calls: Sequence[Sequence[Any]],
    processes: Processes,
    ends: Counter[str],
    restarts: int,
) -> list[Figure]:
    waits: dict[str, list[float]] = {"beside": [], "alone": []}
    by_part: dict[str, list[float]] = {"beside": [], "alone": []}
    for part in parts:
        answered = [call[3] for call in calls if not call[4] and part.begin <= call[0] < part.end]
        waits[part.kind] += answered
        by_part[part.kind].append(round(_p99(answered), 1))
    beside, alone = _p99(waits["beside"]), _p99(waits["alone"])
    also = {}
    for kind, found in waits.items():
        also[f"{kind}_p50_ms"] = quantiles(found, n=2)[0]
        also[f"{kind}_longest_ms"] = max(found)
        also[f"{kind}_calls"] = len(found)
    cycles = len(parts) // 2
    runs, where = cycles if cycles >= MIN_RUNS else 1, machine()

    def figure(name: str, value: float, unit: str, note: str, **more: Any) -> Figure:
        return Figure(f"abuse_{name}", value, None, None, unit, runs, where, note, **more)

    failed: Counter[str] = Counter(call[4] for call in calls if call[4])
    above, limited = processes.above_idle(), processes.limited()
    by_process = {f"{name}_mib": size for name, size in above.items()}
    internal = {name: count for name, count in ends.items() if _is_internal(name)}
    note = f"{QUIET_PER_S:g} calls a second; hostile ones: {len(ATTACKS)} kinds"
    quiet = figure("quiet_p99", beside, "ms", note, settings={"p99_ms": by_part}, also=also)
    idle = f"idle: { {name: round(size) for name, size in processes.idle.items()} }"
    lost = restarts + len(processes.ended)
    return [
        replace(quiet, peer=alone, ratio=alone / beside),
        figure("quiet_failed", failed.total(), "calls", f"{dict(failed)}"),
        figure("memory_above_idle", max(above.values()), "MiB", idle, also=by_process),
        figure(
            "child_memory",
            max(limited.values(), default=0.0),
            "MiB",
            "processes with own limits",
            also=limited,
        ),
        figure("ended", lost, "processes", f"{processes.ended}"),
        figure(
            "internal",
            sum(internal.values()),
            "calls",
            f"{internal}",
            settings={"ends": dict(sorted(ends.items()))},
        ),
    ]


def _is_internal(ended: str) -> bool:
    return any(code in ended for code in (" INTERNAL", " UNKNOWN", "status 500"))
