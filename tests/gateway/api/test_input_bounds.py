"""Fields whose size or count a caller chooses: past the bound the call ends with a typed error that names the field.

docs/reference/input-bounds.md has all of them, also those that other tests hold.
"""

import json
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gateway.api.admin_service import LIST_MAX
from gateway.validation.conversation import VALUES_MAX
from sluice.errors import InvalidRequest, MessageTooLarge
from sluice.v1 import admin_pb2 as admin
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from tests.gateway.kit.wire import Wire, error_of, prompt

LONG: Final = "x" * 65
ASKED: Final = pb.ChatMessage(role=pb.ROLE_USER, content="hi")


def chat(*calls: pb.ToolCall) -> pb.ChatInput:
    said = pb.ChatMessage(role=pb.ROLE_ASSISTANT, tool_calls=calls)
    return pb.ChatInput(messages=[ASKED, said, ASKED])


def strings(count: int) -> str:
    return json.dumps({"a": [""] * count})


ADMIN: list[tuple[str, Message, str]] = [
    ("ListRequests", admin.ListRequestsRequest(limit=LIST_MAX + 1), "limit"),
    ("ListRequests", admin.ListRequestsRequest(tenant=LONG), "tenant"),
    ("ListRequests", admin.ListRequestsRequest(model=LONG), "model"),
    ("CancelRequests", admin.CancelRequestsRequest(tenant=LONG), "tenant"),
    (
        "CancelRequests",
        admin.CancelRequestsRequest(request_ids=["req-1"] * (LIST_MAX + 1)),
        "request_ids",
    ),
    ("CancelRequests", admin.CancelRequestsRequest(request_ids=["req-1", LONG]), "request_ids"),
    ("DrainWorker", admin.DrainWorkerRequest(model=LONG, worker="h:1/w"), "model"),
    ("DrainWorker", admin.DrainWorkerRequest(model="small", worker="w" * 257, undo=True), "worker"),
    ("ReadMetrics", admin.ReadMetricsRequest(names=["sluice.queue.tasks"] * 1000), "names"),
    ("ReadMetrics", admin.ReadMetricsRequest(names=["\u754c" * 300_000]), "names"),
    ("GetRequestRecord", admin.GetRequestRecordRequest(request_id=LONG), "request_id"),
    ("GetRequestRecord", admin.GetRequestRecordRequest(trace_id=LONG), "trace_id"),
    ("GetAuditEntry", admin.GetAuditEntryRequest(request_id=LONG), "request_id"),
    ("SubmitFeedback", admin.SubmitFeedbackRequest(request_id=LONG), "request_id"),
    ("SubmitFeedback", admin.SubmitFeedbackRequest(request_id="r", grade=float("nan")), "grade"),
    ("ListTenants", admin.ListTenantsRequest(tenant=LONG), "tenant"),
    ("ForgetTenant", admin.ForgetTenantRequest(tenant=LONG), "tenant"),
    ("StreamOutcomes", admin.StreamOutcomesRequest(tenants=["a"] * (LIST_MAX + 1)), "tenants"),
    ("StreamOutcomes", admin.StreamOutcomesRequest(tenants=[LONG]), "tenants"),
    (
        "StreamOutcomes",
        admin.StreamOutcomesRequest(since_time=Timestamp(seconds=1 << 60)),
        "since_time",
    ),
    ("ClearAnswers", admin.ClearAnswersRequest(tenant=LONG), "tenant"),
    ("ClearAnswers", admin.ClearAnswersRequest(model=LONG), "model"),
    ("ClearAnswers", admin.ClearAnswersRequest(answer_key="a." * 1000), "answer_key"),
]

TEXTS: list[tuple[str, Message, str]] = [
    (
        "Generate",
        pb.GenerateRequest(
            chat=chat(*(pb.ToolCall(id=f"c{i}", name="f") for i in range(VALUES_MAX + 1)))
        ),
        "chat.messages",
    ),
    ("Generate", pb.GenerateRequest(chat=chat(*[pb.ToolCall()] * 60_000)), "chat.messages"),
    (
        "Generate",
        pb.GenerateRequest(chat=chat(pb.ToolCall(id="c", name="f", arguments=strings(VALUES_MAX)))),
        "chat.messages",
    ),
    (
        "CountTokens",
        pb.CountTokensRequest(
            chat=chat(pb.ToolCall(id="c", name="f", arguments=strings(VALUES_MAX)))
        ),
        "chat.messages",
    ),
    (
        "Generate",
        prompt(
            tools=[
                pb.Tool(name=f"t{i}", parameters=json.dumps({"enum": [""] * 15_000}))
                for i in range(2)
            ]
        ),
        "tools[0].parameters",
    ),
    ("ListModels", pb.ListModelsRequest(page_token="9" * 10), "page_token"),
]


async def test_a_request_about_the_mesh_is_bounded(wire: Wire) -> None:
    for method, request, field in ADMIN:
        await _refused(getattr(AdminServiceStub(wire.channel), method)(request), field)


async def test_what_a_prompt_is_made_of_is_counted(wire: Wire) -> None:
    for method, request, field in TEXTS:
        await _refused(getattr(InferenceServiceStub(wire.channel), method)(request), field)


async def test_a_message_over_the_limit_says_both_numbers(wire: Wire) -> None:
    _, error = await error_of(wire.stub.Generate(prompt("x" * (1 << 20))))
    assert isinstance(error, MessageTooLarge)
    assert error.metadata["limit_bytes"] == str(1 << 20)


async def _refused(call: Any, field: str) -> None:
    _, error = await error_of(call)
    assert isinstance(error, InvalidRequest), error
    assert [one.field for one in error.violations] == [field]
