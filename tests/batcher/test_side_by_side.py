"""Two batchers on one worker: neither starves, it is not overbooked beyond the bound, a killed one loses nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from tritonclient.grpc import service_pb2_grpc

from batcher.workers.client import infer_request, step_report
from sluice.internal.v1 import worker_pb2
from tests.batcher.batchers import ECHO, batcher_process, running_batcher, settings_of
from tests.batcher.gateway_double import BOUND_S, GatewayDouble, echo_of
from tests.support.triton import TritonServer, running_triton

SLOTS = 8
BATCHERS = 2
HEARD = 3
"""Reports, a heartbeat apart."""
PACED = ECHO.model_copy(update={"slots": SLOTS, "max_waiting_rows": SLOTS, "echo_step_ms": 5.0})


@pytest.fixture(scope="module")
def paced_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A worker whose answers take a while."""
    with running_triton(tmp_path_factory.mktemp("paced_triton"), (PACED,)) as server:
        yield server


@asynccontextmanager
async def watched(address: str) -> AsyncIterator[list[worker_pb2.WorkerLoad]]:
    """The loads that a worker tells of, as a third batcher without tasks hears them, from its report `HEARD` on.

    The first batcher had all slots while it was alone: by then it has heard that it is not.
    """
    loads: list[worker_pb2.WorkerLoad] = []
    heard = asyncio.Event()
    opening = worker_pb2.OpenChannel(batcher="watcher", heartbeat_ms=100)
    request = infer_request("echo", worker_pb2.WorkerRequest(open_channel=opening), ends=True)

    async def listen(call: grpc.aio.StreamStreamCall) -> None:
        async for streamed in call:
            report = step_report(streamed)
            if report is not None:
                loads.append(report.load)
                if len(loads) == HEARD:
                    heard.set()

    async with grpc.aio.insecure_channel(address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(request)
        listening = asyncio.create_task(listen(call))
        try:
            await asyncio.wait_for(heard.wait(), BOUND_S)
            yield loads
        finally:
            call.cancel()
            await asyncio.wait([listening])


async def test_both_progress_and_the_worker_is_not_overbooked(
    nats_url: str, gateway: GatewayDouble, paced_triton: TritonServer
) -> None:
    settings = settings_of(nats_url, paced_triton.address, PACED)
    async with running_batcher(settings), running_batcher(settings):
        await gateway.another_batcher_live()
        async with watched(paced_triton.address) as loads:
            tasks = [await gateway.ask(max_tokens=20 + n % 7) for n in range(120)]
            for task in tasks:
                assert (await gateway.finished(task, 30.0)).token_ids == echo_of(task)
    senders = [gateway.senders[task.request_id] for task in tasks]
    assert all(len(names) == 1 for names in senders)
    shares = [sum(name in names for names in senders) for name in set.union(*senders)]
    assert len(shares) == BATCHERS
    assert min(shares) >= len(tasks) // 4
    # What one batcher may add on an old word of the worker is its part of the slots.
    bound = SLOTS + (BATCHERS - 1) * -(-SLOTS // BATCHERS)
    most = max(load.running + load.waiting for load in loads)
    assert SLOTS <= most <= bound
    assert gateway.returned == []
    # A row that a worker refused is sent again under another batch: never in a loop.
    assert all(gateway.answers[task.request_id].attempt == 0 for task in tasks)


async def test_the_rows_of_a_killed_batcher_go_on_at_the_other(
    nats_url: str, gateway: GatewayDouble, paced_triton: TritonServer, tmp_path: Path
) -> None:
    settings = settings_of(nats_url, paced_triton.address, PACED)
    with batcher_process(settings, tmp_path / "first") as first:
        victim = await gateway.batcher_live()
        async with running_batcher(settings):
            await gateway.another_batcher_live()
            tasks = [await gateway.ask(max_tokens=150) for _ in range(30)]
            await gateway.until(lambda: any(victim in names for names in gateway.senders.values()))
            first.kill()
            await gateway.lost(victim)
            for task in tasks:
                answer = await gateway.finished(task, 60.0)
                assert answer.token_ids == echo_of(task)
