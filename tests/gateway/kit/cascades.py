"""What tests of cascades say and look at."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc

from sluice.internal.v1.frame_pb2 import Frame, Logprobs, TaskEnd
from sluice.v1 import admin_pb2
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from tests.gateway.kit.batcher import BOUND_S, frame
from tests.gateway.kit.wire import Wire

GOOD: Final = "hello world hello world"
BAD: Final = "world world world world"


def saying(
    wire: Wire, text: str, logprob: float, *, end: "TaskEnd.ValueType | None" = None
) -> Frame:
    """All tokens of ``text``, each as sure as ``logprob``."""
    tokens = wire.tokens(text)
    values = [
        Logprobs(logprob=logprob, top_token_ids=[one, 0], top_logprobs=[logprob, -9.0])
        for one in tokens
    ]
    return frame(0, tokens, logprobs=values, end=end)


def notices(events: Sequence[pb.GenerateResponse]) -> list[pb.Notice]:
    return [event.notices[0] for event in events if event.notices]


async def explained(
    wire: Wire, request_id: str, wanted: Callable[[admin_pb2.RequestRecord], Any] = lambda _: True
) -> admin_pb2.RequestRecord:
    """The record of a request, once it is written and has what is ``wanted``."""
    stub: Any = AdminServiceStub(wire.channel)
    query = admin_pb2.GetRequestRecordRequest(request_id=request_id)
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(grpc.aio.AioRpcError):  # not written yet
                record: admin_pb2.RequestRecord = (await stub.GetRequestRecord(query)).record
                if wanted(record):
                    return record
            await asyncio.sleep(0.01)


async def audited(wire: Wire, request_id: str) -> admin_pb2.GetAuditEntryResponse:
    """The audit entry of a request, once it is written."""
    stub: Any = AdminServiceStub(wire.channel)
    query = admin_pb2.GetAuditEntryRequest(request_id=request_id)
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(grpc.aio.AioRpcError):  # not written yet
                entry: admin_pb2.GetAuditEntryResponse = await stub.GetAuditEntry(query)
                return entry
            await asyncio.sleep(0.01)
