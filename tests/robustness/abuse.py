"""Abuse beside an interactive caller: what hostile calls get, and what a well-behaved caller notices of them.

A whole mesh with the echo engine; the attack runs in a process of its own, and the interactive caller, of another
tenant, asks ten times a second in open loop. One JSON line an attack: how its calls ended by
code, calls of the interactive caller that were refused or failed, its longest wait for a first token, how late it asked
at most (a machine that is too busy for the caller itself shows nothing), and the resident memory of each process
before, at the highest and a moment after.

    scripts/robustness abuse [--attacks turns,megabyte,bulk,resume,schemas,slow,vanished,idle] [--size N] [--raised]

--size: bulk calls, slow readers, vanished callers and idle connections (5,000 and 10,000 in docs/concepts/faults.md).
--raised: `max_concurrent_requests` is twice the size and no share is kept, so that all slow readers and vanished
callers come in.

    scripts/robustness abuse --attacks hostile [--minutes 60] [--cycle 5]

Hostile tenants of every kind at once beside a quiet one, with API keys and shipped limits; prints figures, which
`tests.robustness.hostile_run` defines.
"""

import argparse
import asyncio
import json
import resource
import statistics
import time
from collections import Counter
from typing import Any, Final

from bench.support.harness import emit
from bench.support.meshes import echo, mesh_of, mesh_settings
from sluice.settings import CallShares, GatewaySettings, Settings
from supervisor.mesh import Mesh
from tests.robustness.attacks import ATTACKS
from tests.robustness.hostile_run import hostile, read_json, start_beside
from tests.robustness.mesh_memory import memory_of, watch_memory
from tests.support.settings import tuned

HOSTILE: Final = "hostile"
CALLS_PER_S: Final = 10
CALM_S: Final = 2.0
"""Before and after an attack, seconds."""
SAMPLE_S: Final = 0.5


def settings_of(size: int, raised: bool) -> Settings:
    """One echo model; ``raised``: with room for ``size`` calls."""
    room = {
        "max_concurrent_requests": 2 * size,
        "shares": CallShares(standard=1, bulk=1, tenant=1),
    }
    limits: dict[str, Any] = room if raised else {}
    return mesh_settings(echo(64), gateway=tuned(GatewaySettings, address="127.0.0.1:0", **limits))


async def abuse(mesh: Mesh, name: str, size: int, hold_s: float) -> dict[str, Any]:
    """Run one attack; return its line of the output."""
    before = Counter({process: int(kib) >> 10 for process, kib in memory_of(mesh).items()})
    highest = Counter(before)
    watching = asyncio.ensure_future(watch_memory(mesh, highest, SAMPLE_S))
    caller = await start_beside("quiet_caller", mesh.address, str(CALLS_PER_S))
    assert caller.stdin is not None, "piped"
    caller.stdin.write(b"\n")
    await asyncio.sleep(CALM_S)
    begun = time.monotonic()
    attack = await start_beside("attacks", name, mesh.address, str(size), str(hold_s))
    output, _ = await attack.communicate()
    seconds = time.monotonic() - begun
    await asyncio.sleep(CALM_S)
    watching.cancel()
    caller.stdin.close()
    calls = await read_json(caller)
    after = memory_of(mesh)
    late, first = ([call[at] for call in calls if not call[4]] for at in (1, 2))
    return {
        "attack": name,
        "exit_code": attack.returncode,
        "outcomes": json.loads(output or b"{}"),
        "seconds": round(seconds, 1),
        "interactive_calls": len(calls),
        "interactive_errors": dict(Counter(call[4] for call in calls if call[4])),
        "interactive_p50_ms": round(statistics.median(first)),
        "interactive_longest_ms": round(max(first)),
        "interactive_late_ms": round(max(late)),
        "rss_mib": {
            process: [before[process], highest[process], int(after.get(process, 0)) >> 10]
            for process in before
        },
    }


async def main(options: argparse.Namespace) -> None:
    """Run the attacks, each on the same mesh."""
    if options.attacks == HOSTILE:
        emit(await hostile(options.minutes, options.cycle), options.json)
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # of the gateway and the attacker too
    async with mesh_of(settings_of(options.size, options.raised)) as mesh:
        for name in options.attacks.split(","):
            print(json.dumps(await abuse(mesh, name, options.size, options.hold)), flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names, with commas between")
    parser.add_argument("--size", type=int, default=5_000)
    parser.add_argument("--hold", type=float, default=10.0, help="how long callers stay, seconds")
    parser.add_argument("--raised", action="store_true", help="limits that let all of them in")
    parser.add_argument("--minutes", type=float, default=60.0, help="of hostile")
    parser.add_argument("--cycle", type=float, default=5.0, help="of hostile, in minutes")
