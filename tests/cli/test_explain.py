"""`sluice explain`, `trace` and `feedback`."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cli.explain import waterfall
from sluice.v1 import admin_pb2
from sluice.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from sluice.v1.inference_pb2 import FINISH_REASON_STOP, ROUTE_STRATEGY_RULES, Timings
from sluice.wire.clock import duration, timestamp
from tests.cli.commands import Cli, served

RECORD = admin_pb2.RequestRecord(
    request_id="req-1",
    trace_id="ab" * 16,
    arrival_time=timestamp(0),
    route=admin_pb2.RouteRecord(
        strategy=ROUTE_STRATEGY_RULES,
        candidates=[admin_pb2.RouteCandidate(model="large", cost=0.002)],
        versions={"routing": "v7"},
    ),
    attempts=[
        admin_pb2.ModelAttempt(
            model="large",
            prompt_tokens=20,
            completion_tokens=5,
            batch_id="ba-1",
            batch_cause="worker_idle",
            batch_rows=3,
            queue_wait=duration(1.5),
            escalation_reason="unsure",
        ),
        admin_pb2.ModelAttempt(model="huge", prompt_tokens=20),
    ],
    timings=Timings(queue=duration(1.5), time_to_first_token=duration(8), total=duration(20)),
    finish_reason=FINISH_REASON_STOP,
)
TRACE = "AB" * 16


class Admin(AdminServiceServicer):
    """Knows one request; remembers grades."""

    def __init__(self) -> None:
        self.grades: list[tuple[str, float]] = []
        self.asked: list[admin_pb2.GetRequestRecordRequest] = []

    async def GetRequestRecord(
        self, request: admin_pb2.GetRequestRecordRequest, context: Any
    ) -> Any:
        self.asked.append(request)
        others = [f"req-{number}" for number in range(2, 40)]
        response = admin_pb2.GetRequestRecordResponse(record=RECORD, other_request_ids=others)
        response.grade.grade = 0.5
        return response

    async def GetAuditEntry(self, request: admin_pb2.GetAuditEntryRequest, context: Any) -> Any:
        return admin_pb2.GetAuditEntryResponse(request_id=request.request_id, blocked=True)

    async def SubmitFeedback(self, request: admin_pb2.SubmitFeedbackRequest, context: Any) -> Any:
        self.grades.append((request.request_id, request.grade))
        return admin_pb2.SubmitFeedbackResponse()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Admin, str]]:
    service = Admin()
    async with served(add_AdminServiceServicer_to_server, service) as address:
        yield service, address


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ("explain", "req-1"),
            [
                "  request_id req-1",
                "  arrival_time 1970-01-01T00:00:00Z",
                "    strategy ROUTE_STRATEGY_RULES",
                "      cost 0.002",
                "      routing v7",
                "    queue_wait 0.001500s",
                "    model huge",
                "  grade 0.5",
                "other_request_ids req-39",
            ],
        ),
        (("explain", "req-1", "--audit"), ["request_id req-1", "blocked yes"]),
        (
            ("trace", "req-1"),
            [
                f"req-1: stop; trace {'ab' * 16}",
                "queue          1.5 ms  ####",
                f"other         18.5 ms      {'#' * 44}",
                "total         20.0 ms  first token after 8.0 ms",
                "large: 20 + 5 tokens",
                "  waited 1.5 ms for batch ba-1 of 3 (worker_idle)",
                "  then another model: unsure",
            ],
        ),
    ],
    ids=["explain", "audit", "trace"],
)
async def test_text_and_json(cli: Cli, words: tuple[str, ...], lines: list[str]) -> None:
    async with serving() as (_, address):
        ran = await cli(*words, "--address", address)
        told = await cli(*words, "--json", "--address", address)
    assert ran.code == 0, ran.err
    assert [line for line in ran.out.splitlines() if line in lines] == lines
    described = json.loads(told.out)
    assert described.get("record", described)["request_id"] == "req-1"


@pytest.mark.parametrize("words", ["explain ID", "trace ID", "explain ID --audit", "feedback ID 1"])
async def test_the_id_of_a_trace_names_its_request(cli: Cli, words: str) -> None:
    async with serving() as (service, address):
        ran = await cli(*words.replace("ID", TRACE).split(), "--address", address)
    assert ran.code == 0, ran.err
    (asked,) = service.asked
    assert (asked.trace_id, asked.request_id) == (TRACE.lower(), "")
    assert "req-1" in ran.out or service.grades == [("req-1", 1.0)]


def test_a_request_without_timings_has_no_bars() -> None:
    assert waterfall(admin_pb2.RequestRecord(error_reason="OVERLOADED")) == []
