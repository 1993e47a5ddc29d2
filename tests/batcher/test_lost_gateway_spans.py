"""The traces of a gateway that was killed say that they are incomplete."""

import asyncio

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sluice.internal.v1.frame_pb2 import TASK_END_LENGTH
from sluice.telemetry import names
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble
from tests.batcher.worker_double import WorkerDouble, frame

BOUND_S = 60.0
SPAN = "b7ad6b7169203331"
LATE = "baad6b7169203331"
LIVING = "aaad6b7169203331"


def headers(span: str) -> dict[str, str]:
    return {"traceparent": f"00-0af7651916cd43dd8448eb211c80319c-{span}-01"}


async def test_a_batcher_marks_the_traces_of_a_gateway_that_is_gone(
    nats_url: str, gateway: GatewayDouble
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def marks() -> list[ReadableSpan]:
        found = (one for one in exporter.get_finished_spans() if one.name == names.SPAN_INCOMPLETE)
        return [one for one in found if (one.attributes or {})[names.INCOMPLETE_FROM] == "gateway"]

    async with WorkerDouble.running() as worker:
        settings = settings_of(nats_url, worker.address, ECHO)
        async with running_batcher(settings, provider.get_tracer("test")):
            await gateway.batcher_live()
            async with GatewayDouble.connected(nats_url, "lost") as lost:
                await lost.batcher_live()
                gone = await lost.publish(lost.task(max_tokens=1), headers(SPAN))
                await lost.taken(gone)
            async with GatewayDouble.connected(nats_url, "late") as late:
                await late.batcher_live()
                ended = await late.publish(late.task(max_tokens=1), headers(LATE))
                living = await gateway.publish(gateway.task(max_tokens=1), headers(LIVING))
                await worker.until(lambda: sum(len(batch.tasks) for batch in worker.batches) == 3)
                for batch in worker.batches:
                    await worker.admit(batch)
                    await worker.step(
                        *(frame(row, 0, (5,), TASK_END_LENGTH) for row in batch.tasks)
                    )
                await gateway.finished(living)
                await late.finished(ended)
            async with asyncio.timeout(BOUND_S):
                while len(marks()) < 2:  # noqa: ASYNC110, an exporter has no event
                    await asyncio.sleep(0.05)
    parents = {one.parent.span_id for one in marks() if one.parent is not None}
    assert parents == {int(SPAN, 16), int(LATE, 16)}
