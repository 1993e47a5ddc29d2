"""A worker that an operator drains gets no new rows and ends those it has; gateways tell a batcher that has started."""

from nats.aio.client import Client

from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.control_pb2 import ControlMessage, DrainedWorker, DrainRecord, DrainsChanged
from sluice.wire import subjects
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble
from tests.batcher.worker_double import WorkerDouble


async def tell(client: Client, revision: int, *workers: str) -> None:
    drained = [DrainedWorker(model=ECHO.name, worker=name) for name in workers]
    told = DrainsChanged(record=DrainRecord(workers=drained), revision=revision)
    message = ControlMessage(gateway="gw", drains_changed=told)
    await client.publish(subjects.CONTROL, message.SerializeToString())


async def test_no_new_rows_until_it_is_put_back_also_after_a_restart(
    nats_url: str, gateway: GatewayDouble
) -> None:
    def live(count: int) -> bool:
        return bool(gateway.reports) and gateway.reports[-1].models[0].workers == count

    async with WorkerDouble.running() as one, WorkerDouble.running() as other:
        model = ECHO.model_copy(update={"triton_url": (one.address, other.address)})
        settings = settings_of(nats_url, one.address, model)
        async with running_batcher(settings):
            await gateway.until(lambda: live(2))
            first = await gateway.ask(max_tokens=3)
            await gateway.until(lambda: len(one.batches) + len(other.batches) == 1)
            busy, idle = (one, other) if one.batches else (other, one)
            await tell(gateway.client, 3, f"{busy.address}/{ECHO.name}")
            await gateway.until(lambda: live(1))
            await tell(gateway.client, 2)  # older
            final = frame_pb2.Final(end=frame_pb2.TASK_END_LENGTH)
            await busy.step(
                frame_pb2.Frame(request_id=first.request_id, token_ids=[1, 2, 3], final=final)
            )
            await gateway.finished(first)
        async with running_batcher(settings):
            await busy.opened(2)
            await gateway.until(lambda: gateway.reports[-1].drains_revision == 0)
            await tell(gateway.client, 3, f"{busy.address}/{ECHO.name}")
            await gateway.until(lambda: live(1))
            for count in range(1, 4):
                await gateway.ask(max_tokens=3)
                await idle.until(lambda count=count: rows_of(idle) == count)
            assert rows_of(busy) == 1
            await tell(gateway.client, 4)
            await gateway.until(lambda: live(2))


def rows_of(worker: WorkerDouble) -> int:
    return sum(len(batch.tasks) for batch in worker.batches)
