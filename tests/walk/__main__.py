"""Measure how much code one plain request meets, on a real mesh: scripts/walk [CHECKOUT] [--json] [--names].

Definitions, of CHECKOUT (default: this tree). The mesh is the one of `sluice up` with the small built-in model, all
else as shipped, one caller, gRPC, `model: auto`, `WARM` requests before. Each process counts with `sys.setprofile`; a
comprehension or generator expression is a part of the function that it stands in.

- `files`, `functions`: what of gateway/ and sluice/ a Generate starts from its first byte until its task is published;
  only what each of `REQUESTS` requests in turn started, because heartbeats and the like come between.
- `classes`: of gateway/ and sluice/, those with one instance more for each of `HELD` requests that a batcher has
  accepted and that wait there for the only slot of a model.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

WARM: Final = 50
REQUESTS: Final = 20
HELD: Final = 3
LONGEST: Final = 900
"""Tokens of the answer that others wait behind: as many as the context has room for."""
HELD_TRIES: Final = 5
"""How often `classes` is measured until the answer before the others lasts long enough."""
SLOTS: Final = 32
CALL_S: Final = 120.0
SETTLE_S: Final = 5.0
MANY: Final = "many"
ONE: Final = "one"
PROBE: Final = Path(__file__).parent / "probe"


class Probed:
    """A process of the mesh that runs tests/walk/probe."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def query(self, command: str) -> Any:
        """Return the answer to a command."""
        self._writer.write(command.encode() + b"\n")
        return json.loads(await asyncio.wait_for(self._reader.readline(), CALL_S))


class Caller:
    """A plain client of the mesh."""

    def __init__(self, stub: Any, pb: Any) -> None:
        self._stub, self._pb = stub, pb

    async def generate(
        self,
        tokens: int,
        *,
        model: str = "auto",
        number: int = 0,
        on_message: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Read an answer of `tokens` tokens to its end."""
        sampling = self._pb.SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0)
        prompt = f"What is the total of 314 and {number}?"
        request = self._pb.GenerateRequest(prompt=prompt, model=model, sampling=sampling)
        call = self._stub.Generate(request, timeout=CALL_S)
        try:
            async for message in call:
                on_message(message)
        finally:
            call.cancel()


async def gateway_path(gateway: Probed, caller: Caller) -> dict[str, Any]:
    """Return `files` and `functions`."""
    common: set[str] | None = None
    for number in range(REQUESTS):
        await gateway.query("begin task")
        await caller.generate(1, number=number)
        started = set(await gateway.query("end"))
        common = started if common is None else common & started
    functions = sorted(common or ())
    return {
        "files": sorted({name.split(":")[0] for name in functions}),
        "functions": functions,
    }


async def held_classes(gateway: Probed, caller: Caller) -> list[str]:
    """Return `classes`."""
    # The answer before the others fills caches that no request holds: states of the output filter's automaton.
    await caller.generate(LONGEST, model=ONE)
    for _ in range(HELD_TRIES):
        classes = await _try_held_classes(gateway, caller)
        if classes is not None:
            return classes
    raise RuntimeError(f"an answer of {LONGEST} tokens ended before others could wait behind it")


async def _try_held_classes(gateway: Probed, caller: Caller) -> list[str] | None:
    """Return `classes`; None if the answer before the others ended too soon."""
    computing, accepted = asyncio.Event(), [asyncio.Event() for _ in range(HELD)]

    def on_first_answer(message: Any) -> None:
        if message.delta.token_ids:
            computing.set()

    async with asyncio.TaskGroup() as group:
        first = group.create_task(caller.generate(LONGEST, model=ONE, on_message=on_first_answer))
        await computing.wait()  # its slot is taken
        before = Counter(await gateway.query("instances"))
        waiting = [
            group.create_task(
                caller.generate(1, model=ONE, number=number, on_message=lambda _, e=event: e.set())
            )
            for number, event in enumerate(accepted)
        ]
        for event in accepted:  # `Started` comes once a batcher has the task
            await event.wait()
        after = Counter(await gateway.query("instances"))
        is_measured = not any(task.done() for task in (first, *waiting))
        for task in (first, *waiting):
            task.cancel()
    if not is_measured:
        return None
    return sorted(name for name, count in after.items() if count - before[name] >= HELD)


@asynccontextmanager
async def probed_mesh() -> AsyncIterator[tuple[Probed, Caller]]:
    """Yield the gateway and a client of a mesh of the tree in the working directory."""
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
            streams = await asyncio.open_unix_connection(f"{folder}/gateway", limit=1 << 24)
            yield Probed(*streams), Caller(InferenceServiceStub(channel), inference_pb2)


async def walk() -> dict[str, Any]:
    """Return all figures of the tree in the working directory, with the names behind them."""
    async with probed_mesh() as (gateway, caller):
        for number in range(WARM):
            await caller.generate(1, number=number)
        await caller.generate(1, model=ONE)
        await asyncio.sleep(SETTLE_S)
        figures = await gateway_path(gateway, caller)
        figures["classes"] = await held_classes(gateway, caller)
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="all names, as JSON")
    parser.add_argument("--names", action="store_true", help="the names behind the counts")
    arguments = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    figures = asyncio.run(walk())
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:12} {len(value) if isinstance(value, list) else value}")
        if arguments.names and isinstance(value, list):
            print(*(f"    {entry}" for entry in value), sep="\n")


if __name__ == "__main__":
    main()
