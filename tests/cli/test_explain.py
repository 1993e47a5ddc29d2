"""`sluice explain` and `sluice feedback`."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sluice.v1 import admin_pb2
from sluice.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from sluice.v1.inference_pb2 import (
    FINISH_REASON_STOP,
    PRIORITY_STANDARD,
    ROUTE_STRATEGY_RULES,
    Timings,
)
from sluice.v1.safety_pb2 import SAFETY_ACTION_FLAG, SAFETY_ACTION_REDACT
from sluice.wire.clock import duration, timestamp
from tests.cli.commands import Cli, served

RECORD = admin_pb2.RequestRecord(
    request_id="req-1",
    trace_id="ab" * 16,
    tenant="acme",
    priority=PRIORITY_STANDARD,
    workload="invoices",
    requested_model="auto",
    arrival_time=timestamp(0),
    policy="default@1",
    decisions=[
        admin_pb2.SafetyDecision(rule="pii.iban", action=SAFETY_ACTION_REDACT, count=2),
        admin_pb2.SafetyDecision(
            rule="secret.jwt", action=SAFETY_ACTION_REDACT, count=1, in_answer=True
        ),
        admin_pb2.SafetyDecision(rule="guard.harm.S1", action=SAFETY_ACTION_FLAG, count=1),
    ],
    guards=[
        admin_pb2.GuardCheck(
            guard="harm",
            model="lg",
            outcome=admin_pb2.GUARD_OUTCOME_FLAGGED,
            categories=["S1", "S9"],
            action=SAFETY_ACTION_FLAG,
            score=0.75,
            duration=duration(12.5),
            cost=0.001,
        ),
        admin_pb2.GuardCheck(
            guard="harm",
            model="lg",
            in_answer=True,
            answer_tokens=64,
            outcome=admin_pb2.GUARD_OUTCOME_NO_VERDICT,
            failure="timeout",
            action=SAFETY_ACTION_FLAG,
            duration=duration(1000),
        ),
    ],
    route=admin_pb2.RouteRecord(
        strategy=ROUTE_STRATEGY_RULES,
        reason="long",
        candidates=[
            admin_pb2.RouteCandidate(
                model="large",
                tier="large",
                quality=0.875,
                cost=0.002,
                expected_wait=duration(12),
                reason="long",
            )
        ],
        versions={"routing": "v7"},
        scores=[
            admin_pb2.RouterScore(
                policy="routing",
                version="r1",
                head=admin_pb2.ROUTER_HEAD_PROMPT,
                gain=0.375,
                chances={"small": 0.5, "large": 0.875},
            )
        ],
    ),
    attempts=[
        admin_pb2.ModelAttempt(
            model="large",
            prompt_tokens=20,
            completion_tokens=5,
            cost=0.001,
            attempt=1,
            worker="w-1",
            batch_id="ba-1",
            batch_cause="worker_idle",
            batch_rows=3,
            padding_share=0.25,
            queue_wait=duration(1.5),
            queue_wait_max=duration(4),
        ),
        admin_pb2.ModelAttempt(model="huge", prompt_tokens=20),
    ],
    shadows=[
        admin_pb2.ShadowRun(
            model="small",
            agreement=0.5,
            prompt_tokens=20,
            completion_tokens=4,
            cost=0.001,
            duration=duration(12.5),
        ),
        admin_pb2.ShadowRun(model="next", dropped="in_flight"),
    ],
    timings=Timings(queue=duration(1.5), time_to_first_token=duration(8), total=duration(20)),
    finish_reason=FINISH_REASON_STOP,
    gateway="gw-1",
    currency="EUR",
)


class Admin(AdminServiceServicer):
    """Knows one request; remembers grades."""

    def __init__(self) -> None:
        self.grades: list[tuple[str, float]] = []
        self.asked: list[admin_pb2.GetRequestRecordRequest] = []
        self.others: list[str] = []

    async def GetRequestRecord(
        self, request: admin_pb2.GetRequestRecordRequest, context: Any
    ) -> Any:
        self.asked.append(request)
        response = admin_pb2.GetRequestRecordResponse(record=RECORD, other_request_ids=self.others)
        response.grade.grade = 0.5
        return response

    async def GetAuditEntry(self, request: admin_pb2.GetAuditEntryRequest, context: Any) -> Any:
        return admin_pb2.GetAuditEntryResponse(
            request_id=request.request_id,
            tenant="acme",
            policy="default@1",
            decisions=RECORD.decisions,
            blocked=True,
            governed_model="large",
            prompt_hmac=b"\xab\xcd",
            with_text=True,
        )

    async def SubmitFeedback(self, request: admin_pb2.SubmitFeedbackRequest, context: Any) -> Any:
        self.grades.append((request.request_id, request.grade))
        return admin_pb2.SubmitFeedbackResponse()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Admin, str]]:
    service = Admin()
    async with served(add_AdminServiceServicer_to_server, service) as address:
        yield service, address


async def test_for_people(cli: Cli) -> None:
    async with serving() as (_, address):
        ran = await cli("explain", "req-1", "--address", address)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"request   req-1, trace {'ab' * 16}, gateway gw-1",
        "asked     1970-01-01 00:00:00 UTC by acme, standard, task invoices",
        "safety    pii.iban x2 redact, secret.jwt x1 redact (answer), policy default@1",
        "guard     harm (lg) on the prompt: S1, S9, flag, score 0.75; 12.5 ms, cost 0.001 EUR",
        "guard     harm (lg) on the answer, 64 tokens: timeout, flag; 1000.0 ms, cost 0 EUR",
        "route     asked for auto: rules, long",
        "          routing v7",
        "          routing, prompt head of r1: gain 0.38 (large 0.88, small 0.50)",
        "  1.      large (large), quality 0.88, cost 0.002, wait 12 ms: long",
        "model     large: 20 + 5 tokens, cost 0.001 EUR, sent again once",
        "batch     ba-1: 3 requests on w-1",
        "          sent because of worker_idle, 25% padding; waited 1.5 ms (longest in the batch 4.0 ms)",
        "model     huge: 20 + 0 tokens, cost 0 EUR",
        "shadow    small agrees to 50%: 20 + 4 tokens, cost 0.001 EUR, 12.5 ms",
        "shadow    next: in_flight; cost 0 EUR",
        "time      first token 8.0 ms, total 20.0 ms: queue 1.5",
        "end       stop",
        "grade     0.5",
    ]


TRACE = "AB" * 16


@pytest.mark.parametrize(
    "words",
    [
        ("explain", TRACE),
        ("trace", TRACE),
        ("explain", TRACE, "--audit"),
        ("feedback", TRACE, "1"),
    ],
)
async def test_the_id_of_a_trace_names_its_request(cli: Cli, words: tuple[str, ...]) -> None:
    async with serving() as (service, address):
        ran = await cli(*words, "--address", address)
    assert ran.code == 0, ran.err
    (asked,) = service.asked
    assert (asked.trace_id, asked.request_id) == (TRACE.lower(), "")
    assert "req-1" in ran.out or service.grades == [("req-1", 1.0)]


async def test_other_requests_of_a_trace_are_named(cli: Cli) -> None:
    async with serving() as (service, address):
        service.others = ["req-8", "req-9"]
        ran = await cli("explain", TRACE, "--address", address)
    assert ran.out.splitlines()[1] == "          its trace also has req-8, req-9"


async def test_explain_fits_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (service, address):
        service.others = [f"req-{number}" for number in range(40)]
        for columns, widest in (("60", 60), ("100", 100), ("300", 100)):
            monkeypatch.setenv("COLUMNS", columns)
            ran = await cli("explain", "req-1", "--address", address)
            lines = ran.out.splitlines()
            assert max(map(len, lines)) <= widest
            assert all(
                line.startswith(" " * 10) or line[0] != " " or "." in line[:10] for line in lines
            )


async def test_the_audit_for_people_and_programs(cli: Cli) -> None:
    async with serving() as (_, address):
        ran = await cli("explain", "req-1", "--audit", "--address", address)
        told = await cli("explain", "req-1", "--audit", "--json", "--address", address)
    assert ran.out.splitlines() == [
        "request   req-1 of acme",
        "decided   1970-01-01 00:00:00 UTC, policy default@1",
        "safety    pii.iban x2 redact, secret.jwt x1 redact (answer), guard.harm.S1 x1 flag",
        "          the prompt was refused",
        "          answered by the governed model large",
        "prompt    HMAC abcd",
        "          its text is in the entry",
    ]
    assert json.loads(told.out)["decisions"][0]["rule"] == "pii.iban"


async def test_for_programs(cli: Cli) -> None:
    async with serving() as (_, address):
        ran = await cli("explain", "req-1", "--json", "--address", address)
    explained = json.loads(ran.out)
    assert explained["record"]["attempts"][0]["batch_cause"] == "worker_idle"
    assert explained["grade"] == {"grade": 0.5}


async def test_feedback_is_sent(cli: Cli) -> None:
    async with serving() as (service, address):
        ran = await cli("feedback", "req-1", "0.25", "--address", address)
    assert ran.code == 0
    assert service.grades == [("req-1", 0.25)]


async def test_without_a_gateway_there_is_one_line_and_a_code(cli: Cli) -> None:
    ran = await cli("explain", "req-1", "--address", "127.0.0.1:1")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
