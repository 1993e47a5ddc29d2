"""An hour of hostile tenants beside a quiet one: what the quiet one notices, and what the mesh needs.

Definitions, fixed before the first run:

- The mesh: `sluice up`'s processes on one machine, one of each, one echo model (512 rows: the engine is not what is
  measured), API keys asked for, HTTP on, all limits as shipped; `jobs.private_hosts` lets webhooks reach this machine.
- The quiet tenant: interactive calls with answers of 4 tokens, `QUIET_PER_S` a second by Poisson arrivals, from a
  process of its own. The latency of a call goes from when it was due to the end of its answer; a call that failed
  counts as failed, and not as a latency.
- Hostile tenants: one for each kind of `tests.robustness.hostile.RATES`, at these rates, from one process with nice 10.
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
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import psutil

from bench.support.harness import MIN_RUNS, Figure, machine
from sluice.settings import (
    GatewaySettings,
    HttpSettings,
    IdentitySettings,
    JobsSettings,
    ModelSettings,
    Settings,
)
from sluice.settings.routing import RoutingSettings
from supervisor.mesh import Mesh, running_mesh
from tests.robustness.attacks import MODEL
from tests.robustness.hostile import KINDS, RATES

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
_SUPPORT: Final = Path(__file__).parent


def hostile_settings() -> Settings:
    """See above."""
    model = ModelSettings(name=MODEL, path="builtin:small", engine="echo", slots=SLOTS)
    return Settings(
        models=(model,),
        routing=RoutingSettings(default=MODEL),
        gateway=GatewaySettings(address="127.0.0.1:0"),
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
        families: the highest sum of a process and its children, above idle.
        ended: which of those that stay have ended.
    """

    mesh: Mesh
    idle: dict[str, float] = field(default_factory=dict)
    highest: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)
    _known: dict[int, str] = field(default_factory=dict)

    def sample(self) -> dict[str, float]:
        """The memory of now; of several of one name that of the largest."""
        parents, rss = {}, {}
        for one in psutil.process_iter(["ppid", "memory_info"]):
            info = one.info["memory_info"]
            if info is not None:
                parents[one.pid], rss[one.pid] = one.info["ppid"], info.rss / (1 << 20)
        roots = {one.pid: one.name for one in self.mesh.state.processes if one.pid is not None}
        found: dict[str, float] = {}
        sums: Counter[str] = Counter()
        alive = {}
        for pid, size in rss.items():
            family = _family(pid, parents, roots)
            if family is None:
                continue
            name = self._known.get(pid) or (family if pid in roots else f"{family}/{_module(pid)}")
            alive[pid] = name
            found[name] = max(size, found.get(name, 0.0))
            sums[family] += size  # type: ignore[assignment]
        self._note_ended(alive)
        self.families |= sums
        return found

    def begin(self) -> None:
        """What is there now is idle."""
        self.families.clear()
        self.idle = self.sample()
        self._idle_sums = Counter(self.families)

    async def watch(self) -> None:
        """Takes a sample each second, until it is cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.highest |= Counter(self.sample())  # type: ignore[arg-type]

    def _note_ended(self, alive: dict[int, str]) -> None:
        gone = [name for pid, name in self._known.items() if pid not in alive]
        self.ended += [name for name in gone if name.rpartition("/")[2] not in LIMITED]
        self._known = alive

    def above_idle(self) -> dict[str, float]:
        """Of the processes that stay, MiB."""
        return {name: self.highest[name] - idle for name, idle in self.idle.items()}

    def limited(self) -> dict[str, float]:
        """Of those with limits of their own, by module, MiB."""
        found: Counter[str] = Counter()
        for name, size in self.highest.items():
            module = name.rpartition("/")[2]
            if module in LIMITED:
                found[module] = max(size, found[module])
        return {name: float(size) for name, size in found.items()}

    def family_above_idle(self) -> dict[str, float]:
        """Of a process with all its children, MiB."""
        return {name: size - self._idle_sums[name] for name, size in self.families.items()}


def _family(pid: int, parents: Mapping[int, int], roots: Mapping[int, str]) -> str | None:
    while pid and pid not in roots:
        pid = parents.get(pid, 0)
    return roots.get(pid)


def _module(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return "unknown"
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
    """Of a run: from when to when calls count, and who was there."""

    beside: bool
    begin: float
    end: float


async def _started(script: str, *words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, str(_SUPPORT / script), *words)
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe,
        stdout=pipe,
        limit=1 << 30,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        start_new_session=True,  # the kernel may share cores by session
    )


async def _said(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    async with asyncio.timeout(END_S):
        return json.loads(await process.stdout.read())


async def _parts(
    mesh: Mesh, keys: Mapping[str, str], minutes: float, cycle: float
) -> tuple[list[Part], Counter[str]]:
    """The whole run: its parts, and how hostile calls ended."""
    parts, ends = [], Counter[str]()
    cycles = max(1, round(minutes / cycle))
    whole_s = 60 * minutes / cycles
    for _ in range(cycles):
        for beside, seconds in (
            (False, ALONE_SHARE * whole_s),
            (True, (1 - ALONE_SHARE) * whole_s),
        ):
            begin = time.monotonic()
            settle_s = min(SETTLE_S, seconds / 3)
            parts.append(Part(beside, begin + settle_s, begin + seconds))
            if not beside:
                await asyncio.sleep(seconds)
                continue
            assert mesh.http is not None
            attackers = await _started("hostile.py", mesh.address, mesh.http, str(seconds))
            assert attackers.stdin is not None
            attackers.stdin.write(json.dumps(dict(keys)).encode() + b"\n")
            await asyncio.sleep(seconds)
            for kind, found in (await _said(attackers)).items():
                ends.update({f"{kind} {code}": count for code, count in found.items()})
            await attackers.wait()
    return parts, ends


@contextlib.asynccontextmanager
async def _watched(processes: Processes) -> AsyncIterator[None]:
    watching = asyncio.create_task(processes.watch())
    yield
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def hostile(minutes: float, cycle: float) -> list[Figure]:
    """Runs a mesh, its quiet tenant and its hostile ones."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with running_mesh(hostile_settings(), state_dir=Path(folder)) as mesh:
            keys = await _keys((QUIET, *KINDS), Path(folder))
            await asyncio.sleep(KNOWN_S)
            quiet = await _started("quiet_caller.py", mesh.address, str(QUIET_PER_S))
            assert quiet.stdin is not None
            quiet.stdin.write(keys.pop(QUIET).encode() + b"\n")
            await asyncio.sleep(WARM_CALLS / QUIET_PER_S)
            processes = Processes(mesh)
            processes.begin()
            async with _watched(processes):
                parts, ends = await _parts(mesh, keys, minutes, cycle)
            quiet.stdin.close()
            calls = await _said(quiet)
            restarts = sum(one.restarts for one in mesh.state.processes)
    return _figures(parts, calls, processes, ends, restarts)


def _p99(waits: Sequence[float]) -> float:
    return quantiles(waits, n=100)[98]


def _figures(
    parts: Sequence[Part],
    calls: Sequence[tuple[float, float, str]],
    processes: Processes,
    ends: Counter[str],
    restarts: int,
) -> list[Figure]:
    waits: dict[bool, list[float]] = {True: [], False: []}
    by_part: list[float] = []
    failed: Counter[str] = Counter(code for _, _, code in calls if code)
    for part in parts:
        found = [ms for due, ms, code in calls if not code and part.begin <= due < part.end]
        waits[part.beside] += found
        by_part.append(round(_p99(found), 1))
    beside, alone = _p99(waits[True]), _p99(waits[False])
    cycles = len(parts) // 2
    runs = cycles if cycles >= MIN_RUNS else 1
    where, rates = machine(), f"{QUIET_PER_S:g} calls a second; hostile ones: {dict(RATES)}"
    also = {
        "beside_p50_ms": quantiles(waits[True], n=2)[0],
        "alone_p50_ms": quantiles(waits[False], n=2)[0],
        "beside_longest_ms": max(waits[True]),
        "alone_longest_ms": max(waits[False]),
        "beside_calls": len(waits[True]),
        "alone_calls": len(waits[False]),
    }
    of_parts = {"p99_ms_alone": by_part[::2], "p99_ms_beside": by_part[1::2]}
    above, limited = processes.above_idle(), processes.limited()
    families = processes.family_above_idle()
    internal = {name: count for name, count in ends.items() if _is_internal(name)}
    named = {f"{name}_mib": size for name, size in above.items()}
    named |= {f"{name}_with_children_mib": size for name, size in families.items()}
    return [
        Figure(
            "abuse_quiet_p99",
            beside,
            alone,
            alone / beside,
            "ms",
            runs,
            where,
            rates,
            of_parts,
            also,
        ),
        Figure(
            "abuse_quiet_failed",
            failed.total(),
            None,
            None,
            "calls",
            runs,
            where,
            f"{dict(failed)}",
        ),
        Figure(
            *("abuse_memory_above_idle", max(above.values()), None, None, "MiB", runs, where),
            *(f"idle: {_rounded(processes.idle)}", {}, named),
        ),
        Figure(
            *("abuse_child_memory", max(limited.values(), default=0.0), None, None, "MiB", runs),
            *(where, "processes with limits of their own", {}, limited),
        ),
        Figure(
            *("abuse_ended", restarts + len(processes.ended), None, None, "processes", runs),
            *(where, f"{processes.ended}"),
        ),
        Figure(
            *("abuse_internal", sum(internal.values()), None, None, "calls", runs, where),
            *(f"{internal}", {"ends": dict(sorted(ends.items()))}),
        ),
    ]


def _is_internal(ended: str) -> bool:
    return any(code in ended for code in (" INTERNAL", " UNKNOWN", "status 500"))


def _rounded(sizes: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items()}
