"""Both shipped tiers begin together: the answer is to the letter that of one of them, and the record tells of both."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from model_workers.tiers.tasks import heldout
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2 import GetRequestRecordRequest, RequestRecord
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.mesh import TOGETHER, RunningMesh

if TYPE_CHECKING:
    from sluice.v1.inference_pb2_grpc import InferenceServiceAsyncStub

pytestmark = pytest.mark.mesh

TIMEOUT_S = 60.0


@dataclass
class Answer:
    """What a client saw."""

    started: pb.Started = field(default_factory=pb.Started)
    finished: pb.Finished = field(default_factory=pb.Finished)
    text: str = ""
    taken_back: str = ""


async def ask(stub: "InferenceServiceAsyncStub", request: pb.GenerateRequest) -> Answer:
    answer, tokens = Answer(), 0
    async for event in stub.Generate(request, timeout=TIMEOUT_S):
        if event.HasField("started"):
            answer.started = event.started
        elif event.HasField("notice") and event.notice.kind == pb.NOTICE_KIND_ESCALATED:
            answer.taken_back, answer.text, tokens = answer.text, "", 0
        elif event.HasField("delta"):
            assert event.delta.index == tokens
            tokens += len(event.delta.token_ids)
            answer.text += event.delta.text
        elif event.HasField("finished"):
            answer.finished = event.finished
    return answer


def asked(model: str, **fields: Any) -> list[pb.GenerateRequest]:
    """Questions of every kind."""
    return [
        pb.GenerateRequest(
            prompt=example.prompt,
            model=model,
            sampling=pb.SamplingParams(max_tokens=example.max_tokens),
            **fields,
        )
        for example in heldout(n_per_cell=1, seed=5)
    ]


async def explained(channel: grpc.aio.Channel, request_id: str) -> RequestRecord:
    stub: Any = AdminServiceStub(channel)
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                found = await stub.GetRequestRecord(GetRequestRecordRequest(request_id=request_id))
            except grpc.aio.AioRpcError:  # not written yet
                await asyncio.sleep(0.02)
            else:
                return found.record  # type: ignore[no-any-return]


@pytest.mark.parametrize("accept_replace", [False, True])
async def test_a_speculative_answer_is_that_of_the_model_that_gave_it(
    mesh: RunningMesh, accept_replace: bool
) -> None:
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stub = InferenceServiceStub(channel)
        alone = {
            model: await asyncio.gather(*(ask(stub, request) for request in asked(model)))
            for model in ("small", "large")
        }
        requests = asked("", labels=TOGETHER, accept_replace=accept_replace)
        answers = await asyncio.gather(*(ask(stub, request) for request in requests))
        records = [await explained(channel, one.started.request_id) for one in answers]
    for number, answer in enumerate(answers):
        assert answer.started.route.strategy == pb.ROUTE_STRATEGY_SPECULATIVE
        assert answer.text == alone[answer.finished.model][number].text
        assert not answer.taken_back or accept_replace
        assert alone["small"][number].text.startswith(answer.taken_back)
    assert {answer.finished.model for answer in answers} == {"small", "large"}
    for answer, record in zip(answers, records, strict=True):
        first, second = record.attempts
        assert (first.model, second.model, first.single_start_reason) == ("small", "large", "")
        assert bool(second.unused_reason) == (answer.finished.model == "small")
        assert bool(first.escalation_reason) == (answer.finished.model == "large")
        assert [leg.unused for leg in answer.finished.attempts] == [
            False,
            bool(second.unused_reason),
        ]
