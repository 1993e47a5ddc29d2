"""What `sluice top` takes of a core while it shows a mesh with ten models, in a terminal of its own.

The peer is procps' `top` with the same interval, on the processes of this machine. Both are measured after their first
screen. AdminService is served in this process, with the metrics of a gateway and a batcher that has a worker a model.
"""

import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import termios
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from bench.support.harness import Figure, Run, compare, machine
from sluice.telemetry.exchange import MetricsExchange
from sluice.telemetry.names import SERVICE_BATCHER, SERVICE_GATEWAY
from sluice.telemetry.registry import MetricRegistry
from sluice.v1 import admin_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server

FIGURE: Final = "top_core_percent"
UNIT: Final = "percent of a core"
INTERVAL_S: Final = 2
"""As shipped."""
SIZE: Final = (40, 120)
"""Lines and columns of the terminal."""
START_S: Final = 30.0
SETTLED_S: Final = 2.5
"""From the first screen on: then the second has been drawn, and what is imported late is imported."""
TENANTS: Final = 20


async def top_cost(runs: int, seconds: float, metrics: Sequence[MetricRegistry]) -> Figure:
    """`top_core_percent`; ``metrics`` of a gateway and of a batcher."""
    async with _admin(metrics) as address:
        ours = [sys.executable, "-m", "cli", "top", "--address", address]
        run = _core_percent(ours, seconds)
        if shutil.which("top") is None:
            alone = statistics.median([await run() for _ in range(runs)])
            note = "the peer is missing: apt-get install procps"
            return Figure(FIGURE, alone, None, None, UNIT, runs, machine(), note)
        return await compare(
            FIGURE,
            run,
            _core_percent(["top", "-d", str(INTERVAL_S)], seconds),
            unit=UNIT,
            higher_is_better=False,
            note=f"ten models, {TENANTS} tenants, every {INTERVAL_S} s, {seconds:g} s a run; the peer is procps' top",
            runs=runs,
        )


def _core_percent(command: Sequence[str], seconds: float) -> Run:
    async def measured() -> float:
        screen, terminal = os.openpty()
        termios.tcsetwinsize(terminal, SIZE)
        environment = {**os.environ, "TERM": "xterm"}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
        )
        os.close(terminal)
        drawn, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(screen, _read, screen, drawn)
        try:
            await asyncio.wait_for(drawn.wait(), START_S)
            await asyncio.sleep(SETTLED_S)
            begun = _cpu_s(process.pid)
            await asyncio.sleep(seconds)
            return (_cpu_s(process.pid) - begun) / seconds * 100
        finally:
            loop.remove_reader(screen)
            os.close(screen)
            process.kill()
            await process.wait()

    return measured


def _read(screen: int, drawn: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        os.read(screen, 65_536)
        drawn.set()


def _cpu_s(pid: int) -> float:
    """Of all threads: nanoseconds, where the times of a process are in ticks of 10 ms."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class _Admin(AdminServiceServicer):
    def __init__(self, metrics: Sequence[MetricRegistry]) -> None:
        services = (SERVICE_GATEWAY, SERVICE_BATCHER)
        self._own = [
            MetricsExchange(service, service, registry)
            for service, registry in zip(services, metrics, strict=True)
        ]
        counts = [
            pb.RunningCount(tenant=f"tenant-{n}", model=f"model-{n % 10}", requests=n)
            for n in range(TENANTS)
        ]
        self._running = pb.ListRequestsResponse(counts=counts, gateways=["gw"])

    async def ReadMetrics(self, request: pb.ReadMetricsRequest, context: Any) -> Any:
        return pb.ReadMetricsResponse(processes=[one._own(set(request.names)) for one in self._own])

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> Any:
        return self._running


@asynccontextmanager
async def _admin(metrics: Sequence[MetricRegistry]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_AdminServiceServicer_to_server(_Admin(metrics), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
