"""How much code one plain request meets, on a real mesh: scripts/walk [CHECKOUT] [--json] [--names].

Definitions, of CHECKOUT (this tree, unless said) on Python 3.12, whose `sys.monitoring` counts. The mesh is the one of
`sluice up` with the small built-in model, all else as shipped, one caller, gRPC, `model: auto`, `WARM` requests before:

- `files`, `functions`: what of gateway/ a Generate starts from its first byte until its task is published; only what
  each of `REQUESTS` requests in turn started, because heartbeats and the like come between.
- `classes`: of gateway/, those with one instance more for each of `HELD` requests that wait in the batcher.
- `row_calls`: calls of Python functions of batcher/ for a request of one token, all phases: the mean of `ROWS` requests
  in turn, less what it calls in the same time while nothing is asked.
- `frame_calls`: the same for a frame of 32 rows: 32 answers of `LONG` tokens against 32 of `SHORT`, divided by the
  difference in tokens; the model computes a step at a time, and each step is a frame.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

WARM: Final = 50
REQUESTS: Final = 20
HELD: Final = 3
ROWS: Final = 300
SHORT: Final = 32
LONG: Final = 160
RUNS: Final = 5
LONGEST: Final = 900
"""Tokens of the answer that others wait behind."""
HELD_S: Final = 0.3
SLOTS: Final = 32
CALL_S: Final = 120.0
SETTLE_S: Final = 5.0
MANY: Final = "many"
ONE: Final = "one"
PROBE: Final = Path(__file__).parent / "probe"

Calls = Mapping[str, int]


class Probed:
    """A process of the mesh that answers; see tests/walk/probe."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, command: str) -> Any:
        """The answer to a command."""
        self._writer.write(command.encode() + b"\n")
        return json.loads(await asyncio.wait_for(self._reader.readline(), CALL_S))


class Caller:
    """A plain client of the mesh."""

    def __init__(self, stub: Any, pb: Any) -> None:
        self._stub, self._pb = stub, pb

    async def ask(self, tokens: int, *, model: str = "auto", number: int = 0) -> None:
        """Reads an answer of ``tokens`` tokens to its end."""
        sampling = self._pb.SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0)
        prompt = f"What is the total of 314 and {number}?"
        request = self._pb.GenerateRequest(prompt=prompt, model=model, sampling=sampling)
        call = self._stub.Generate(request, timeout=CALL_S)
        try:
            async for _ in call:
                pass
        finally:
            call.cancel()


async def gateway_path(gateway: Probed, caller: Caller) -> dict[str, Any]:
    """`files` and `functions`."""
    common: set[str] | None = None
    for number in range(REQUESTS):
        await gateway.ask("begin task")
        await caller.ask(1, number=number)
        started = set(await gateway.ask("end"))
        common = started if common is None else common & started
    functions = sorted(common or ())
    return {
        "files": sorted({name.split(":")[0] for name in functions}),
        "functions": functions,
    }


async def held_classes(gateway: Probed, caller: Caller) -> list[str]:
    """`classes`."""
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(caller.ask(LONGEST, model=ONE))]
        await asyncio.sleep(HELD_S)  # its slot is taken
        before = Counter(await gateway.ask("instances"))
        running += [
            group.create_task(caller.ask(1, model=ONE, number=number)) for number in range(HELD)
        ]
        await asyncio.sleep(HELD_S)
        after = Counter(await gateway.ask("instances"))
        assert not any(task.done() for task in running), "the first answer ended too soon"
        for task in running:
            task.cancel()
    return sorted(name for name, count in after.items() if count - before[name] >= HELD)


async def row_calls(batcher: Probed, caller: Caller) -> float:
    """`row_calls`."""

    async def rows() -> None:
        for number in range(ROWS):
            await caller.ask(1, number=number)

    took, calls = await _counted(batcher, rows)
    _, idle = await _counted(batcher, lambda: asyncio.sleep(took))
    return (sum(calls.values()) - sum(idle.values())) / ROWS


async def frame_calls(batcher: Probed, caller: Caller) -> float:
    """`frame_calls`."""

    async def answers(tokens: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(SLOTS):
                group.create_task(caller.ask(tokens, number=number))

    async def calls(tokens: int) -> int:
        _, counted = await _counted(batcher, lambda: answers(tokens))
        return sum(counted.values())

    both = [(await calls(LONG), await calls(SHORT)) for _ in range(RUNS)]
    return median((long - short) / (LONG - SHORT) for long, short in both)


async def _counted(probed: Probed, work: Callable[[], Awaitable[None]]) -> tuple[float, Calls]:
    begin = time.monotonic()
    await probed.ask("begin")
    await work()
    return time.monotonic() - begin, await probed.ask("end")


@asynccontextmanager
async def probed_mesh() -> AsyncIterator[tuple[Probed, Probed, Caller]]:
    """The mesh of the tree in the working directory: its gateway, its batcher, and a client."""
    import grpc

    from sluice.settings import GatewaySettings, ModelSettings, Settings
    from sluice.settings.routing import RoutingSettings
    from sluice.v1 import inference_pb2
    from sluice.v1.inference_pb2_grpc import InferenceServiceStub
    from supervisor.mesh import running_mesh

    models = tuple(
        ModelSettings(name=name, path="builtin:small", slots=slots)
        for name, slots in ((MANY, SLOTS), (ONE, 1))
    )
    settings = Settings(
        models=models,
        routing=RoutingSettings(default=MANY),
        gateway=GatewaySettings(address="127.0.0.1:0"),
    )
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        os.environ["SLUICE_WALK_SOCKETS"] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join((str(PROBE), os.environ.get("PYTHONPATH", "")))
        async with (
            running_mesh(settings, state_dir=Path(folder) / "state") as mesh,
            grpc.aio.insecure_channel(mesh.address) as channel,
        ):
            gateway, batcher = [
                Probed(*await asyncio.open_unix_connection(f"{folder}/{name}", limit=1 << 24))
                for name in ("gateway", "batcher")
            ]
            yield gateway, batcher, Caller(InferenceServiceStub(channel), inference_pb2)


async def walk() -> dict[str, Any]:
    """All figures of the tree in the working directory, with the names behind them."""
    async with probed_mesh() as (gateway, batcher, caller):
        for number in range(WARM):
            await caller.ask(1, number=number)
        await caller.ask(1, model=ONE)
        await asyncio.sleep(SETTLE_S)
        found = await gateway_path(gateway, caller)
        found["row_calls"] = round(await row_calls(batcher, caller), 1)
        found["frame_calls"] = round(await frame_calls(batcher, caller), 1)
        found["classes"] = await held_classes(gateway, caller)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="all names, as JSON")
    parser.add_argument("--names", action="store_true", help="the names behind the counts")
    arguments = parser.parse_args()
    if sys.version_info < (3, 12):
        sys.exit("scripts/walk counts with sys.monitoring: it needs an environment of Python 3.12")
    sys.path.insert(0, os.getcwd())
    found = asyncio.run(walk())
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:12} {len(value) if isinstance(value, list) else value}")
        if arguments.names and isinstance(value, list):
            print(*(f"    {one}" for one in value), sep="\n")


if __name__ == "__main__":
    main()
