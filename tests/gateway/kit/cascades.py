"""What tests of cascades say and look at."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc

from sluice.internal.v1.frame_pb2 import Frame, Logprobs, TaskEnd
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2 import GetRequestRecordRequest, RequestRecord
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


async def explained(wire: Wire, request_id: str) -> RequestRecord:
    stub: Any = AdminServiceStub(wire.channel)
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                response = await stub.GetRequestRecord(
                    GetRequestRecordRequest(request_id=request_id)
                )
                return response.record  # type: ignore[no-any-return]
            except grpc.aio.AioRpcError:  # not written yet
                await asyncio.sleep(0.01)
