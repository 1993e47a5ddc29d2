"""The events of answers one by one, whichever of them came in one message."""

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from sluice.v1 import inference_pb2 as pb


def events_in(response: pb.GenerateResponse) -> Iterator[pb.GenerateResponse]:
    """The events of a message in their order, each in a message of its own."""
    index = response.answer_index
    if response.HasField("started"):
        yield pb.GenerateResponse(answer_index=index, started=response.started)
    for notice in response.notices:
        yield pb.GenerateResponse(answer_index=index, notices=[notice])
    if response.HasField("delta"):
        yield pb.GenerateResponse(answer_index=index, delta=response.delta)
    if response.HasField("finished"):
        yield pb.GenerateResponse(answer_index=index, finished=response.finished)


def kind_of(event: pb.GenerateResponse) -> str:
    """The field of the only event of a message."""
    (kind,) = (field.name for field, _ in event.ListFields() if field.name != "answer_index")
    return kind


def kinds_of(events: list[pb.GenerateResponse]) -> list[str]:
    return [kind_of(event) for event in events]


class EventStub:
    """A stub of the inference service whose calls of Generate give one event at a time."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def Generate(self, *arguments: Any, **options: Any) -> "EventCall":
        return EventCall(self._stub.Generate(*arguments, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)


class EventCall:
    """A call of Generate that gives one event at a time; else as grpc's."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._events = deque[pb.GenerateResponse]()

    async def read(self) -> Any:
        if not self._events:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                return response
            self._events.extend(events_in(response))
        return self._events.popleft()

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        async for response in self._call:
            for event in events_in(response):
                yield event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
