"""What the batcher does with a worker that misbehaves, by script."""

from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import TracerProvider

from sluice.internal.v1 import control_pb2, frame_pb2
from sluice.settings import BatcherSettings
from sluice.wire import subjects
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble
from tests.batcher.worker_double import WorkerDouble, frame
from tests.support.settings import tuned


@pytest.fixture
async def worker(nats_url: str, gateway: GatewayDouble) -> AsyncIterator[WorkerDouble]:
    """A worker with a batcher in front of it."""
    async with (
        WorkerDouble.running() as double,
        running_batcher(settings_of(nats_url, double.address, ECHO)),
    ):
        await gateway.batcher_live()
        yield double


@pytest.fixture
async def traced(
    nats_url: str, gateway: GatewayDouble, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[WorkerDouble]:
    """A worker with a batcher that traces: the first batch has a stream of its own, the others have none."""
    monkeypatch.setattr("batcher.workers.connection.OWN_STREAMS_PER_S", 1e-3)
    async with WorkerDouble.running() as double:
        settings = settings_of(nats_url, double.address, ECHO)
        async with running_batcher(settings, TracerProvider().get_tracer("test")):
            await gateway.batcher_live()
            yield double


async def test_a_row_travels_whole(worker: WorkerDouble, gateway: GatewayDouble) -> None:
    task = await gateway.ask(timeout_s=30.0)
    batch = await worker.batch(0)
    (row,) = batch.tasks
    assert row.task.request_id == task.request_id
    assert row.task.prompt_token_ids == task.prompt_token_ids
    assert row.attempt == 0
    assert 0 < row.timeout_ms <= 30_000
    await worker.step(frame(row, 0, [1, 2], frame_pb2.TASK_END_STOP))
    answer = await gateway.finished(task)
    assert answer.token_ids == [1, 2]


async def test_a_lost_response_makes_rows_go_on_behind_their_tokens(
    worker: WorkerDouble, gateway: GatewayDouble
) -> None:
    task = await gateway.ask()
    (row,) = (await worker.batch(0)).tasks
    await worker.step(frame(row, 0, [1, 2]))
    await gateway.has_tokens(task, 2)
    await worker.step(frame(row, 3, [4]), skip=1)
    (again,) = (await worker.batch(1)).tasks
    assert list(again.task.produced_token_ids) == [1, 2]
    assert again.attempt == 1
    # It may still be computed there: a new channel ends it.
    openings = [r.open_channel.epoch for r in worker.received if r.HasField("open_channel")]
    assert openings == [1, 2]
    assert [batch.epoch for batch in worker.batches] == openings
    await worker.step(frame(again, 2, [3], frame_pb2.TASK_END_STOP))
    assert (await gateway.finished(task)).token_ids == [1, 2, 3]


async def test_rows_of_a_gateway_that_begins_again_are_dropped(
    worker: WorkerDouble, gateway: GatewayDouble
) -> None:
    task = await gateway.ask()
    await worker.batch(0)
    begins = control_pb2.ControlMessage(gateway=task.gateway, announce=control_pb2.Announce())
    await gateway.client.publish(subjects.CONTROL, begins.SerializeToString())
    await worker.until(lambda: [task.request_id] in worker.cancels)


async def test_a_worker_that_stalls_and_comes_back_confuses_nobody(
    worker: WorkerDouble, gateway: GatewayDouble
) -> None:
    task = await gateway.ask()
    (row,) = (await worker.batch(0)).tasks
    await worker.step(frame(row, 0, [1]))
    await gateway.has_tokens(task, 1)
    worker.silent = True
    await gateway.until(lambda: not gateway.reports[-1].models[0].workers)
    worker.silent = False
    (again,) = (await worker.batch(1)).tasks
    assert again.attempt == 1
    # What it computed before its engine took note of the new channel.
    await worker.step(frame(row, 1, [99], frame_pb2.TASK_END_CANCELLED))
    await worker.step(frame(again, 1, [2], frame_pb2.TASK_END_STOP))
    answer = await gateway.finished(task)
    assert answer.token_ids == [1, 2]
    assert answer.final is not None
    assert answer.final.end == frame_pb2.TASK_END_STOP


@pytest.mark.parametrize(("asks", "silent_s"), [(True, 0.5), (False, 2.0)])
async def test_a_worker_without_rows_may_be_silent_for_longer(
    nats_url: str,
    gateway: GatewayDouble,
    caplog: pytest.LogCaptureFixture,
    asks: bool,
    silent_s: float,
) -> None:
    patient = tuned(BatcherSettings, heartbeat_ms=100, stall_s=0.5, drain_s=0.5)
    async with (
        WorkerDouble.running() as worker,
        running_batcher(settings_of(nats_url, worker.address, ECHO, patient)),
    ):
        await gateway.batcher_live()
        worker.silent = True
        if asks:
            await gateway.ask()
        await gateway.until(lambda: not gateway.reports[-1].models[0].workers)
        lost = next(one.getMessage() for one in caplog.records if "lost worker" in one.getMessage())
        assert lost.endswith(f"silent for {silent_s:g} s")
        worker.silent = False


async def test_nothing_is_sent_before_the_engine_serves_the_channel(
    worker: WorkerDouble, gateway: GatewayDouble
) -> None:
    await gateway.ask()
    await worker.batch(0)
    worker.ready, worker.worker = False, "w2"
    await gateway.until(lambda: not gateway.reports[-1].models[0].workers)
    await worker.opened(2)
    for _ in range(3):
        await worker.step()
    assert len(worker.batches) == 1
    worker.ready = True
    await worker.batch(1)


async def test_a_channel_that_the_worker_ends_is_lost_at_once(
    worker: WorkerDouble, gateway: GatewayDouble
) -> None:
    """As a worker does whose engine hangs; heartbeats would go on."""
    task = await gateway.ask()
    (row,) = (await worker.batch(0)).tasks
    await worker.step(frame(row, 0, [1]))
    await gateway.has_tokens(task, 1)
    await worker.end_channel()
    (again,) = (await worker.batch(1)).tasks
    assert (again.attempt, list(again.task.produced_token_ids)) == (1, [1])


async def test_a_step_that_takes_longer_than_any_limit_loses_nothing(
    worker: WorkerDouble, gateway: GatewayDouble
) -> None:
    worker.steps_slowly = True
    tasks = [await gateway.ask()]
    batches = [await worker.batch(0)]
    tasks.append(await gateway.ask())
    batches.append(await worker.batch(1))
    await gateway.cancel(tasks[1].request_id)
    await worker.until(lambda: worker.cancels == [[tasks[1].request_id]])
    # As many heartbeats as fit into several times the silence after which a worker is lost.
    for _ in range(30):
        await worker.beaten()
    for batch in batches:
        await worker.admit(batch)
    (row,) = batches[0].tasks
    await worker.step(frame(row, 0, [1], frame_pb2.TASK_END_STOP))
    answer = await gateway.finished(tasks[0])
    assert (answer.token_ids, answer.attempt) == ([1], 0)
    assert len(worker.batches) == 2


async def test_a_batch_that_triton_refuses_is_sent_again(
    worker: WorkerDouble, gateway: GatewayDouble
) -> None:
    worker.error = "the model is not ready"
    await gateway.ask()
    await worker.batch(0)
    worker.error = ""
    (again,) = (await worker.batch(1)).tasks
    assert again.attempt == 1


async def test_traced_batch_has_its_own_stream_and_needs_a_receipt(
    nats_url: str, gateway: GatewayDouble
) -> None:
    async with WorkerDouble.running() as worker:
        settings = settings_of(nats_url, worker.address, ECHO)
        async with running_batcher(settings, TracerProvider().get_tracer("test")):
            await gateway.batcher_live()
            worker.silent = True
            await gateway.ask()
            await worker.batch(0)
            worker.silent = False
            (again,) = (await worker.batch(1)).tasks
            assert again.attempt == 1
            traced = ["traceparent" in metadata for metadata in worker.streams]
            assert sorted(traced) == [False, False, True, True]


async def test_traced_batches_beyond_a_rate_go_over_the_channel(
    traced: WorkerDouble, gateway: GatewayDouble
) -> None:
    for number in range(3):
        await gateway.ask()
        await traced.batch(number)
    assert sum("traceparent" in metadata for metadata in traced.streams) == 1


async def test_cancel_waits_for_a_batch_on_its_own_stream(
    traced: WorkerDouble, gateway: GatewayDouble
) -> None:
    traced.receipts.clear()
    task = await gateway.ask()
    await traced.batch(0)
    await gateway.cancel(task.request_id)
    for number in (1, 2):  # over the channel, the second one after the cancel
        await gateway.ask()
        await traced.batch(number)
    assert traced.cancels == []
    traced.receipts.set()
    await traced.until(lambda: traced.cancels == [[task.request_id]])


async def test_a_cancel_waits_for_no_batch_of_a_channel_that_is_lost(
    traced: WorkerDouble, gateway: GatewayDouble
) -> None:
    traced.receipts.clear()
    task = await gateway.ask()
    await traced.batch(0)
    await traced.end_channel()
    await traced.batch(1)  # the row again, over the new channel
    await gateway.cancel(task.request_id)
    await traced.until(lambda: traced.cancels == [[task.request_id]])
    traced.receipts.set()


async def test_the_deadline_of_a_running_row_is_kept_here_too(
    worker: WorkerDouble, gateway: GatewayDouble
) -> None:
    task = await gateway.ask(timeout_s=1.0)
    await worker.batch(0)
    answer = await gateway.finished(task)
    assert answer.final is not None
    assert answer.final.end == frame_pb2.TASK_END_DEADLINE
    await worker.until(lambda: worker.cancels == [[task.request_id]])
