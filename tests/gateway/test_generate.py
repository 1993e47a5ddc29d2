"""The happy path and what the wire may do to it: a real gateway, a real nats-server, the test as batcher."""

import asyncio

from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import Wire, events_of, prompt, text_of, tokens_of


async def test_an_answer_streams_from_started_to_finished(wire: Wire) -> None:
    call = wire.stub.Generate(prompt("hello"))
    task = await wire.batcher.task()
    answer = wire.tokens(" world")
    await wire.batcher.send(task, frame(0, answer[:1]))
    await wire.batcher.send(task, last(1, answer[1:]))
    events = await events_of(call)
    assert [event.WhichOneof("event") for event in (events[0], events[-1])] == [
        "started",
        "finished",
    ]
    assert text_of(events) == " world"
    assert tokens_of(events) == answer
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    await wire.batcher.confirmed(task)
    assert len(wire.gateway.registry) == 0
