"""A worker that an operator drains gets no new rows, ends those it has, and stays drained over a restart."""

from nats.aio.client import Client

from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.control_pb2 import ControlMessage, DrainsChanged
from sluice.internal.v1.gateway_pb2 import DrainedWorker, DrainRecord
from sluice.wire import jetstream, subjects
from sluice.wire.bucket import Bucket
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble
from tests.batcher.worker_double import WorkerDouble


async def write(client: Client, *workers: str) -> None:
    bucket = Bucket(jetstream.DRAINS)
    await bucket.start(client)
    drained = [DrainedWorker(model=ECHO.name, worker=name) for name in workers]
    await bucket.write(subjects.DRAINED_WORKERS, DrainRecord(workers=drained))
    message = ControlMessage(gateway="gw", drains_changed=DrainsChanged())
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
            await write(gateway.client, f"{busy.address}/{ECHO.name}")
            await gateway.until(lambda: live(1))
            final = frame_pb2.Final(end=frame_pb2.ROW_END_LENGTH)
            await busy.step(
                frame_pb2.Frame(request_id=first.request_id, token_ids=[1, 2, 3], final=final)
            )
            await gateway.finished(first)
        async with running_batcher(settings):
            await busy.opened(2)
            await gateway.until(lambda: live(1))
            for count in range(1, 4):
                await gateway.ask(max_tokens=3)
                await idle.until(lambda count=count: rows_of(idle) == count)
            assert rows_of(busy) == 1
            await write(gateway.client)
            await gateway.until(lambda: live(2))


def rows_of(worker: WorkerDouble) -> int:
    return sum(len(batch.rows) for batch in worker.batches)
