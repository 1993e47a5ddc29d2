"""Several workers of one model behind one batcher."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sluice.internal.v1 import frame_pb2
from sluice.settings import ModelSettings
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble
from tests.batcher.worker_double import SLOTS, WorkerDouble, frame

LONG = 300
SLOW = ECHO.model_copy(update={"echo_step_ms": 2.0})


def at(*addresses: str) -> ModelSettings:
    return SLOW.model_copy(update={"triton_url": addresses})


@asynccontextmanager
async def two_workers(
    nats_url: str, gateway: GatewayDouble
) -> AsyncIterator[tuple[WorkerDouble, WorkerDouble]]:
    """Two workers at two addresses with a batcher in front of them."""
    async with WorkerDouble.running() as one, WorkerDouble.running() as two:
        two.worker = "w2"
        model = ECHO.model_copy(update={"triton_url": (one.address, two.address)})
        async with running_batcher(settings_of(nats_url, "127.0.0.1:1", model)):
            await gateway.until(lambda: workers(gateway) == 2)
            yield one, two


def workers(gateway: GatewayDouble) -> int:
    return gateway.reports[-1].models[0].workers if gateway.reports else 0


def rows_of(worker: WorkerDouble) -> list[str]:
    return [row.task.request_id for batch in worker.batches for row in batch.tasks]


async def test_rows_go_to_both_and_a_lost_worker_gives_back_its_own(
    nats_url: str, gateway: GatewayDouble
) -> None:
    async with two_workers(nats_url, gateway) as (one, two):
        report = gateway.reports[-1].models[0]
        assert report.slots == 2 * SLOTS
        tasks = [await gateway.ask() for _ in range(2 * SLOTS)]
        await one.until(lambda: len(rows_of(one)) == SLOTS)
        await two.until(lambda: len(rows_of(two)) == SLOTS)
        kept, lost = rows_of(one), rows_of(two)
        assert sorted(kept + lost) == sorted(task.request_id for task in tasks)
        two.silent = True
        await gateway.until(lambda: workers(gateway) == 1)
        # The first worker is full: what came back waits until it has room.
        assert rows_of(one) == kept
        for batch in one.batches[:]:
            await one.step(*(frame(row, 0, [1], frame_pb2.TASK_END_STOP) for row in batch.tasks))
        await one.until(lambda: len(rows_of(one)) == 2 * SLOTS)
        assert sorted(rows_of(one)[SLOTS:]) == sorted(lost)
        attempts = [row.attempt for batch in one.batches for row in batch.tasks]
        assert attempts == [0] * SLOTS + [1] * SLOTS
        assert one.cancels == []
        # When the second one comes back its new channel ends what others have by now.
        two.silent = False
        await gateway.until(lambda: workers(gateway) == 2)
        assert [r for r in two.received if r.HasField("open_channel")][-1].open_channel.epoch > 1
