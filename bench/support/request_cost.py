"""CPU time of a one-token request, by process: of a mesh with the echo engine, and of a bare grpc.aio server.

CPU time is user and system time of the servers' processes over a window of answered requests, divided by their number;
what they do while idle in that window counts. The client is this process and does not count.
"""

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import psutil

from sluice.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from supervisor.mesh import Mesh

    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

PROMPT: Final = "What is the total of 314, 272, 973, 323, 486?"
CALL_S: Final = 60.0
Processes = Mapping[str, psutil.Process]


@dataclass(frozen=True)
class Cost:
    """What one request took: milliseconds of CPU by process, and requests/s of all callers."""

    cpu_ms: Mapping[str, float]
    requests_per_s: float

    @property
    def total_ms(self) -> float:
        """Of all processes."""
        return sum(self.cpu_ms.values())


def processes_of(mesh: "Mesh") -> dict[str, psutil.Process]:
    """The processes of a mesh and their children (a Triton's stub), by name."""
    found = {}
    for state in mesh.state.processes:
        process = psutil.Process(state.pid)
        found[state.name] = process
        stubs = process.children(recursive=True)
        found |= {f"{state.name}/{stub.name()[:20]}.{stub.pid}": stub for stub in stubs}
    return found


async def cost(stub: "Stub", model: str, processes: Processes, callers: int, requests: int) -> Cost:
    """``requests`` one-token calls by ``callers`` who each send one after the other."""
    before, start = _cpu_s(processes), time.perf_counter()
    await call(stub, model, callers, requests)
    elapsed = time.perf_counter() - start
    spent = _cpu_s(processes)
    spent.subtract(before)
    return Cost({name: 1e3 * s / requests for name, s in spent.items()}, requests / elapsed)


async def call(stub: "Stub", model: str, callers: int, requests: int) -> None:
    """The requests of `cost`."""
    left = itertools.count(requests, -1)
    request = inference_pb2.GenerateRequest(
        prompt=PROMPT, model=model, sampling=inference_pb2.SamplingParams(max_tokens=1)
    )

    async def caller() -> None:
        while next(left) > 0:
            tokens = 0
            async for response in stub.Generate(request, timeout=CALL_S):
                tokens += len(response.delta.token_ids)
            assert tokens == 1, "every request is answered"

    await asyncio.gather(*(caller() for _ in range(callers)))


def _cpu_s(processes: Processes) -> Counter[str]:
    """By name, without the number of a stub."""
    spent: Counter[str] = Counter()
    for name, process in processes.items():
        times = process.cpu_times()
        spent[name.rpartition(".")[0] or name] += times.user + times.system  # type: ignore[assignment]
    return spent


@asynccontextmanager
async def bare_server() -> "AsyncIterator[tuple[Stub, Processes]]":
    """A bare grpc.aio server in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("bare_stream.py")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    port = int(await asyncio.wait_for(process.stdout.readline(), 30))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield stub, {"bare": psutil.Process(process.pid)}
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 10)
