"""The batcher between a real nats-server and a real Triton; the test plays the gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from batcher.workers import client
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2
from sluice.internal.v1.worker_pb2 import WorkerRequest
from sluice.settings import TritonSettings
from sluice.startup import free_port
from sluice.wire import subjects
from tests.batcher.batchers import ECHO, STOP_S, batcher_process, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble, echo_of
from tests.batcher.worker_double import SLOTS, WorkerDouble
from tests.support.nats import running_nats
from tests.support.triton import TritonServer

LONG = 500
"""Tokens of an answer that has only begun when its first ones come."""
MANY, FEW = 400, 40
"""Tasks of two tenants."""
BOUND_S = 60.0
ENDLESS = 5_000_000
"""Tokens of an answer that nobody lets finish."""


@pytest.fixture
async def batcher(
    nats_url: str, gateway: GatewayDouble, echo_triton: TritonServer
) -> AsyncIterator[str]:
    """A batcher that serves the echo model; gives its id."""
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        yield await gateway.batcher_live()


async def test_tasks_are_answered_in_full_and_leave_the_work_queue(
    batcher: str, gateway: GatewayDouble
) -> None:
    tasks = [
        await gateway.ask(
            prompt=(n, n + 1, n + 2), max_tokens=20, priority_class=name, logprobs=True
        )
        for n, name in enumerate(("interactive", "standard", "bulk") * 8)
    ]
    for task in tasks:
        answer = await gateway.finished(task)
        assert answer.token_ids == echo_of(task)
        assert len(answer.logprobs) == len(answer.token_ids)
        assert answer.final is not None
        assert answer.final.end == frame_pb2.TASK_END_LENGTH
        timings = answer.final.timings
        assert all(value > 0 for value in (timings.queue_ms, timings.batch_ms, timings.prefill_ms))
        assert gateway.senders[task.request_id] == {batcher}


async def test_a_lone_caller_never_waits_for_company(batcher: str, gateway: GatewayDouble) -> None:
    """Between its calls the worker is idle, and nothing that it says may make it look busy."""
    for _ in range(30):
        answer = await gateway.finished(await gateway.ask(max_tokens=1))
        assert answer.final is not None
        assert answer.final.batch.cause == "worker_idle"


async def test_a_lost_final_is_sent_again_when_the_gateway_asks(
    batcher: str, gateway: GatewayDouble
) -> None:
    lost: list[int] = []

    def lose(frame: frame_pb2.Frame) -> bool:
        if frame.HasField("final") and len(lost) < 2:
            lost.append(frame.start_index)
            return True
        return False

    gateway.lose = lose
    task = await gateway.ask()
    await gateway.until(lambda: len(lost) == 1)
    await gateway.query(task.request_id)
    await gateway.until(lambda: len(lost) == 2)
    await gateway.query(task.request_id)
    assert (await gateway.finished(task)).token_ids == echo_of(task)


async def test_waiting_requests_of_an_absent_gateway_are_dropped(
    nats_url: str, gateway: GatewayDouble, echo_triton: TritonServer
) -> None:
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        await gateway.batcher_live()
        async with GatewayDouble.connected(nats_url, "mortal") as mortal:
            await mortal.batcher_live()
            tasks = [await mortal.ask(max_tokens=ENDLESS) for _ in range(ECHO.slots)]
            for task in tasks:
                await mortal.has_tokens(task, 1)
            await mortal.ask(max_tokens=ENDLESS)
            await gateway.until(lambda: gateway.reports[-1].models[0].queued == 1)
        await gateway.until(lambda: not gateway.reports[-1].models[0].queued)
        assert gateway.reports[-1].models[0].running == ECHO.slots


async def test_a_channel_is_renewed_under_running_rows(
    nats_url: str,
    gateway: GatewayDouble,
    echo_triton: TritonServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renewals, write = 0, client.WorkerClient.write

    async def counted(
        worker: client.WorkerClient, call: client.Call, request: WorkerRequest, *, ends: bool
    ) -> None:
        nonlocal renewals
        renewals += request.open_channel.renews
        await write(worker, call, request, ends=ends)

    monkeypatch.setattr(client.WorkerClient, "write", counted)
    eager = partial(client.Reports, renewal_bytes=8 * client.RESPONSE_BYTES)
    monkeypatch.setattr("batcher.workers.connection.Reports", eager)
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        await gateway.batcher_live()
        prompts = [range(n, 99) for n in range(1, 4)]
        tasks = [await gateway.ask(prompt=prompt, max_tokens=ENDLESS) for prompt in prompts]
        # How many reports carry a number of tokens depends on the machine's load.
        await gateway.until(lambda: renewals > 1)
        for task, prompt in zip(tasks, prompts, strict=True):
            answer = gateway.answers[task.request_id]
            await gateway.has_tokens(task, len(answer.token_ids) + 1)
            tokens = answer.token_ids
            assert tokens == [prompt[index % len(prompt)] for index in range(len(tokens))]
            assert answer.attempt == 0


async def test_a_gateway_that_has_started_gets_a_report_at_once(
    nats_url: str, gateway: GatewayDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batcher.gateways.INTERVAL_S", 3600.0)
    async with running_batcher(settings_of(nats_url, f"127.0.0.1:{free_port()}", ECHO)):
        await gateway.until(lambda: bool(gateway.reports))
        before = gateway.reports[-1].sequence
        announce = control_pb2.ControlMessage(gateway="new", announce=control_pb2.Announce())
        await gateway.client.publish(subjects.CONTROL, announce.SerializeToString())
        await gateway.until(lambda: gateway.reports[-1].sequence > before)


async def test_a_task_beyond_the_room_of_a_batcher_is_returned(
    nats_url: str, gateway: GatewayDouble, echo_triton: TritonServer
) -> None:
    settings = settings_of(nats_url, f"127.0.0.1:{free_port()}", ECHO)
    settings.batcher.__dict__["room_bytes"] = 1000
    async with WorkerDouble.running() as worker:
        full = settings.model_copy(update={"triton": TritonSettings(url=worker.address)})
        worker.busy = SLOTS
        async with running_batcher(full):
            await gateway.batcher_live()
            taken = await gateway.ask(prompt=range(400))
            await gateway.taken(taken)
            refused = await gateway.ask(prompt=range(400))
            await gateway.until(lambda: refused.request_id in gateway.returned)


async def test_a_batcher_that_ends_gives_its_rows_to_another_at_once(
    nats_url: str, gateway: GatewayDouble, echo_triton: TritonServer, tmp_path: Path
) -> None:
    settings = settings_of(nats_url, echo_triton.address, ECHO)
    with batcher_process(settings, tmp_path / "first") as first:
        await gateway.batcher_live()
        tasks = [await gateway.ask(prompt=range(n, 99), max_tokens=LONG) for n in range(1, 12)]
        await gateway.has_tokens(tasks[0], 1)
        first.terminate()
        await gateway.until(lambda: gateway.reports[-1].leaving)
        await gateway.until(lambda: len(gateway.returned) >= 1)
        async with running_batcher(settings):
            for task in tasks:
                assert (await gateway.finished(task)).token_ids == echo_of(task)
        assert first.wait(STOP_S) == 0


async def test_fault_of_a_model_loop_restarts_it_without_its_requests(
    batcher: str,
    gateway: GatewayDouble,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = await gateway.ask(prompt=range(99), max_tokens=LONG)
    await gateway.has_tokens(task, 1)
    fault = ValueError("a bug")

    def broken(*_: object) -> None:
        monkeypatch.undo()
        raise fault

    before = len(gateway.reports)
    monkeypatch.setattr("batcher.core.requests.RequestTable.advance", broken)
    await gateway.until(
        lambda: any(not report.models[0].workers for report in gateway.reports[before:])
    )
    await gateway.batcher_live()
    await gateway.query(task.request_id)
    assert (await gateway.finished(task)).token_ids == echo_of(task)
    assert gateway.unknown[task.request_id] == 1
    assert "model echo failed" in caplog.text


async def test_a_restart_of_nats_loses_nothing(echo_triton: TritonServer, tmp_path: Path) -> None:
    async with AsyncExitStack() as ends:
        async with running_nats(tmp_path) as url:
            gateway = await ends.enter_async_context(GatewayDouble.connected(url))
            settings = settings_of(url, echo_triton.address, ECHO)
            await ends.enter_async_context(running_batcher(settings))
            await gateway.batcher_live()
            task = await gateway.ask(prompt=range(99), max_tokens=LONG)
            await gateway.has_tokens(task, 1)
        async with running_nats(tmp_path, int(url.rsplit(":", 1)[1])):
            await gateway.reconnected()
            await gateway.query(task.request_id)
            assert (await gateway.finished(task)).token_ids == echo_of(task)
            following = await gateway.ask()
            assert (await gateway.finished(following)).token_ids == echo_of(following)
            await ends.aclose()


async def test_a_batcher_ends_even_while_nats_is_away(
    echo_triton: TritonServer, tmp_path: Path
) -> None:
    async with AsyncExitStack() as ends:
        async with running_nats(tmp_path) as url:
            gateway = await ends.enter_async_context(GatewayDouble.connected(url))
            settings = settings_of(url, echo_triton.address, ECHO)
            process = ends.enter_context(batcher_process(settings, tmp_path))
            await gateway.batcher_live()
            task = await gateway.ask(prompt=range(99), max_tokens=LONG)
            await gateway.has_tokens(task, 1)
        process.terminate()
        assert await asyncio.to_thread(process.wait, STOP_S) == 0


async def queued(gateway: GatewayDouble, tenant: str, count: int) -> list[task_pb2.Task]:
    """Tasks of ``tenant`` that wait, sent."""
    tasks = [
        gateway.task(max_tokens=20, priority_class="bulk", timeout_s=None) for _ in range(count)
    ]
    for task in tasks:
        task.tenant = tenant
    await asyncio.gather(*map(gateway.publish, tasks))
    return tasks


async def test_a_tenant_with_many_waiting_tasks_delays_no_other(
    nats_url: str, gateway: GatewayDouble, echo_triton: TritonServer
) -> None:
    many = await queued(gateway, "many", MANY)
    few = await queued(gateway, "few", FEW)

    def done(tasks: list[task_pb2.Task]) -> int:
        return sum(gateway.answers[task.request_id].final is not None for task in tasks)

    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        await gateway.until(lambda: done(few) == FEW, BOUND_S)
        served = done(many)
    assert served <= 1.1 * FEW + ECHO.slots, "equal weights, equal tokens"
    assert served >= 0.9 * FEW - ECHO.slots
