"""Abuse beside an interactive caller: what hostile calls get, and what a well-behaved caller notices of them.

A whole mesh with the echo engine; the attack runs in a process of its own, and the interactive caller, of another
tenant, asks ten times a second, whatever becomes of it (open loop). One JSON line an attack: how its calls ended by
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
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.support.harness import emit
from sluice.settings import CallShares, GatewaySettings, ModelSettings, Settings
from sluice.settings.routing import RoutingSettings
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from supervisor.mesh import Mesh, running_mesh
from tests.robustness.attacks import ATTACKS, MODEL
from tests.robustness.hostile_run import hostile
from tests.support.settings import tuned

HOSTILE: Final = "hostile"
CALLS_PER_S: Final = 10
CALM_S: Final = 2.0
"""Before and after an attack, seconds."""
CALL_S: Final = 30.0
ATTACKER: Final = Path(__file__).parent / "attacks.py"


def settings_of(size: int, raised: bool) -> Settings:
    """One echo model; ``raised``: with room for ``size`` calls."""
    limits: dict[str, Any] = {}
    if raised:
        limits = {
            "max_concurrent_requests": 2 * size,
            "shares": CallShares(standard=1, bulk=1, tenant=1),
        }
    model = ModelSettings(name=MODEL, path="builtin:small", engine="echo", slots=64)
    return Settings(
        models=(model,),
        routing=RoutingSettings(default=MODEL),
        gateway=tuned(GatewaySettings, address="127.0.0.1:0", **limits),
    )


@dataclass
class InteractiveCaller:
    """Asks at a fixed rate and notes the wait for each first token, seconds."""

    stub: Any
    waits_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    """The most that it began a call too late itself."""
    errors: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            due = time.monotonic()
            while True:
                group.create_task(self._ask())
                self.late_s = max(self.late_s, time.monotonic() - due)
                due += 1 / CALLS_PER_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _ask(self) -> None:
        begun = time.monotonic()
        request = pb.GenerateRequest(
            prompt="one two three", model=MODEL, sampling=pb.SamplingParams(max_tokens=4)
        )
        call = self.stub.Generate(
            request, timeout=CALL_S, metadata=(("sluice-tenant", "interactive"),)
        )
        try:
            first = True
            async for event in call:
                if first and event.HasField("delta"):
                    first = False
                    self.waits_s.append(time.monotonic() - begun)
        except grpc.aio.AioRpcError as error:
            self.errors[error.code().name] += 1
        finally:
            call.cancel()


class Memory:
    """Resident memory of each process of a mesh, with its children, MiB."""

    def __init__(self, mesh: Mesh) -> None:
        # Looked up once: it takes long enough to delay the interactive caller.
        self._families = {
            process.name: [whole, *whole.children(recursive=True)]
            for process in mesh.state.processes
            if process.pid is not None
            for whole in (psutil.Process(process.pid),)
        }
        self.before = self.now()
        self.highest = dict(self.before)

    def now(self) -> dict[str, int]:
        """Of this moment."""
        return {name: sum(map(_rss, family)) >> 20 for name, family in self._families.items()}

    async def watch(self) -> None:
        """Notes the highest, until it is cancelled."""
        while True:
            for name, size in self.now().items():
                self.highest[name] = max(size, self.highest.get(name, 0))
            await asyncio.sleep(0.5)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


async def abuse(mesh: Mesh, name: str, size: int, hold_s: float) -> dict[str, Any]:
    """One attack, as a line of output."""
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        memory, caller = Memory(mesh), InteractiveCaller(InferenceServiceStub(channel))
        beside = [asyncio.ensure_future(caller.run()), asyncio.ensure_future(memory.watch())]
        await asyncio.sleep(CALM_S)
        begun = time.monotonic()
        attack = await asyncio.create_subprocess_exec(
            sys.executable,
            *(str(ATTACKER), name, mesh.address, str(size), str(hold_s)),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await attack.communicate()
        seconds = time.monotonic() - begun
        await asyncio.sleep(CALM_S)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        after = memory.now()
    return {
        "attack": name,
        "exit_code": attack.returncode,
        "outcomes": json.loads(said or b"{}"),
        "seconds": round(seconds, 1),
        "interactive_calls": len(caller.waits_s) + caller.errors.total(),
        "interactive_errors": dict(caller.errors),
        "interactive_p50_ms": round(statistics.median(caller.waits_s) * 1000),
        "interactive_longest_ms": round(max(caller.waits_s) * 1000),
        "interactive_late_ms": round(caller.late_s * 1000),
        "rss_mib": {
            process: [before, memory.highest.get(process, 0), after.get(process, 0)]
            for process, before in memory.before.items()
        },
    }


async def main(options: argparse.Namespace) -> None:
    """Runs the attacks, each on the same mesh."""
    if options.attacks == HOSTILE:
        emit(await hostile(options.minutes, options.cycle), options.json)
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # of the gateway and the attacker too
    settings = settings_of(options.size, options.raised)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with running_mesh(settings, state_dir=Path(folder)) as mesh:
            for name in options.attacks.split(","):
                print(json.dumps(await abuse(mesh, name, options.size, options.hold)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names, with commas between")
    parser.add_argument("--size", type=int, default=5_000)
    parser.add_argument("--hold", type=float, default=10.0, help="how long callers stay, seconds")
    parser.add_argument("--raised", action="store_true", help="limits that let all of them in")
    parser.add_argument("--minutes", type=float, default=60.0, help="of hostile")
    parser.add_argument(
        "--cycle", type=float, default=5.0, help="of hostile: alone and beside, minutes"
    )
    parser.add_argument(
        "--json", action="store_true", help="attacks but hostile print JSON in any case"
    )
    uvloop.run(main(parser.parse_args()))
