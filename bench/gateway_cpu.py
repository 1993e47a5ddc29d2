"""What a request costs the gateway in processor time, beside another checkout of this repository.

    git worktree add --detach /tmp/before COMMIT
    python bench/gateway_cpu.py --before /tmp/before [--json] [--runs N]

`gateway_cpu_KIND`, microseconds: ours is this checkout, peer the other one. Both serve at the same time, each with a
mesh of its own and the echo engine; they are asked in turn. KIND is `grpc` and `http` (a streamed answer of one token
to a prompt of 4,000 characters, 8 callers), and `trivial` (requests to an application that does nothing behind the
gateway's HTTP server, a connection). Tracing is off. Both run with this interpreter and its packages.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import ROOT, Figure, compare, emit, options_of
from bench.support.http_load import stream_chats
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub

SIDE: Final = ROOT / "bench" / "support" / "gateway_side.py"
CALLERS: Final = 8
REQUESTS: Final = 400
TRIVIAL_REQUESTS: Final = 4000
CHARS: Final = 4000
START_S: Final = 120.0

Load = Callable[[dict[str, Any]], Awaitable[int]]
"""Ask one side, and return how many requests that were."""


def prompts() -> Sequence[str]:
    """Make prompts that differ, of `CHARS` characters, which are 574 tokens of the shipped models."""
    words = "number " * (CHARS // len("number "))
    return [f"{number} {words}" for number in range(REQUESTS)]


async def _http(side: dict[str, Any]) -> int:
    await stream_chats(side["http"], "echo", prompts(), CALLERS)
    return REQUESTS


async def _grpc(side: dict[str, Any]) -> int:
    left = iter(prompts())
    async with grpc.aio.insecure_channel(side["grpc"]) as channel:
        stub: Any = InferenceServiceStub(channel)

        async def caller() -> None:
            for prompt in left:
                request = pb.GenerateRequest(prompt=prompt, model="echo")
                request.sampling.max_tokens = 1
                async for _ in stub.Generate(request):
                    pass

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return REQUESTS


async def _trivial(side: dict[str, Any]) -> int:
    host, _, port = side["trivial"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(TRIVIAL_REQUESTS):
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"{}")
    writer.close()
    return TRIVIAL_REQUESTS


KINDS: Final[dict[str, tuple[Load, str]]] = {
    "grpc": (_grpc, "gateway"),
    "http": (_http, "gateway"),
    "trivial": (_trivial, "own"),
}


async def cost_us(load: Load, process: str, side: dict[str, Any]) -> float:
    """Return the processor time of a request in ``process`` of ``side``, in microseconds."""
    measured = psutil.Process(side[process])
    before = sum(measured.cpu_times()[:2])
    count = await load(side)
    return 1e6 * (sum(measured.cpu_times()[:2]) - before) / count


@asynccontextmanager
async def served(checkout: Path) -> AsyncIterator[dict[str, Any]]:
    """Serve with the code of ``checkout``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(SIDE)),
        stdin=PIPE,
        stdout=PIPE,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield json.loads(line)
    finally:
        process.stdin.close()
        await process.wait()


async def main(before: Path, kinds: Sequence[str], runs: int) -> list[Figure]:
    """Measure every kind."""
    figures = []
    async with served(ROOT) as ours, served(before) as peer:
        for kind in kinds:
            load, process = KINDS[kind]
            figures.append(
                await compare(
                    f"gateway_cpu_{kind}",
                    partial(cost_us, load, process, ours),
                    partial(cost_us, load, process, peer),
                    unit="us",
                    higher_is_better=False,
                    note=f"of a request; peer: {before}",
                    runs=runs,
                )
            )
    return figures


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--only", choices=KINDS, action="append", help="these kinds")
    options = parser.parse_args()
    kinds = options.only or list(KINDS)
    emit(uvloop.run(main(options.before.resolve(), kinds, options.runs)), options.json)
