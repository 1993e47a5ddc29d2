"""What is kept of a request, from the call to `Explain`; before a real nats-server."""

import asyncio
from pathlib import Path
from typing import Any

import nats
import pytest

from sluice.internal.v1.audit_pb2 import AuditEntry
from sluice.internal.v1.frame_pb2 import TASK_END_STOP, BatchInfo
from sluice.settings import RecordsSettings
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2 import (
    GetRequestRecordRequest,
    GetRequestRecordResponse,
    RequestRecord,
    SubmitFeedbackRequest,
)
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.inference_pb2 import FINISH_REASON_STOP
from sluice.v1.safety_pb2 import SAFETY_ACTION_BLOCK, SAFETY_ACTION_REDACT
from sluice.wire import subjects
from sluice.wire.clock import ms_of
from sluice.wire.jetstream import stored_messages
from tests.gateway.kit.batcher import BOUND_S, frame
from tests.gateway.kit.metrics import values
from tests.gateway.kit.wire import Wire, error_of, events_of, open_wire, prompt

IBAN = "DE89370400440532013000"
SAFETY = {"policies": {"default": {"actions": {"pii.*": "redact", "pii.us_ssn": "block"}}}}
KEY = "a key of sixteen"


async def explained(wire: Wire, request_id: str) -> GetRequestRecordResponse:
    """Asks until the record has been written."""
    stub: Any = AdminServiceStub(wire.channel)
    async with asyncio.timeout(BOUND_S):
        while True:
            code, response = await _try(
                stub.GetRequestRecord(GetRequestRecordRequest(request_id=request_id))
            )
            if response is not None:
                return response
            assert code == "RECORD_UNKNOWN"
            await asyncio.sleep(0.01)


async def _try(call: Any) -> tuple[str, GetRequestRecordResponse | None]:
    try:
        return "", await call
    except Exception:
        return (await error_of(call))[1].reason, None


async def answered(wire: Wire, text: str, **fields: Any) -> str:
    """The request id of a request that was answered with two tokens."""
    call = wire.stub.Generate(prompt(text, **fields))
    await wire.batcher.forget(await wire.batcher.task())
    task = await wire.batcher.task()
    batch = BatchInfo(batch_id="ba-1", cause="worker_idle", tasks=4, padding_share=0.25, worker="w")
    final = frame(0, wire.tokens("hello world"), end=TASK_END_STOP)
    final.final.batch.CopyFrom(batch)
    await wire.batcher.send(task, final)
    await events_of(call)
    return task.request_id


async def test_a_record_holds_every_decision_and_no_text(nats_url: str, model_folder: Path) -> None:
    async with open_wire(nats_url, model_folder, safety=SAFETY) as wire:
        request_id = await answered(wire, f"pay to {IBAN}", labels={"task": "invoices"})
        record = (await explained(wire, request_id)).record
    assert (record.tenant, record.workload, record.requested_model) == (
        "default", "invoices", "small",
    )  # fmt: skip
    (decision,) = record.decisions
    assert (decision.rule, decision.action, decision.count) == ("pii.iban", SAFETY_ACTION_REDACT, 1)
    assert record.route.strategy == pb.ROUTE_STRATEGY_PINNED
    assert [one.model for one in record.route.candidates] == ["small"]
    (run,) = record.attempts
    assert (run.model, run.completion_tokens, run.attempt) == ("small", 2, 1)
    assert (run.batch_id, run.batch_cause, run.batch_rows, run.worker) == (
        "ba-1", "worker_idle", 4, "w",
    )  # fmt: skip
    assert record.finish_reason == FINISH_REASON_STOP
    assert ms_of(record.timings.total) > 0
    assert IBAN.encode() not in record.SerializeToString()


async def test_a_blocked_request_is_named_in_its_error_and_explained(
    nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, safety=SAFETY) as wire:
        _, error = await error_of(wire.stub.Generate(prompt("my number is 078-05-1121")))
        assert error.reason == "SAFETY_BLOCKED"
        record = (await explained(wire, error.metadata["request_id"])).record
    assert record.error_reason == "SAFETY_BLOCKED"
    assert [d.action for d in record.decisions] == [SAFETY_ACTION_BLOCK]
    assert not record.HasField("route")
    assert not record.attempts


async def test_the_last_grade_is_kept(wire: Wire) -> None:
    request_id = await answered(wire, "hello")
    await explained(wire, request_id)
    stub: Any = AdminServiceStub(wire.channel)
    for grade in (0.0, 0.75):
        await stub.SubmitFeedback(SubmitFeedbackRequest(request_id=request_id, grade=grade))
    assert (await explained(wire, request_id)).grade.grade == 0.75


@pytest.mark.parametrize(
    ("request_id", "grade", "reason"),
    [
        ("req-nobody", 1.0, "RECORD_UNKNOWN"),
        ("no.token", 1.0, "REQUEST_INVALID"),
        ("req-1", 1.5, "REQUEST_INVALID"),
        ("req-1", float("nan"), "REQUEST_INVALID"),
    ],
)
async def test_bad_feedback_is_refused(
    wire: Wire, request_id: str, grade: float, reason: str
) -> None:
    stub: Any = AdminServiceStub(wire.channel)
    request = SubmitFeedbackRequest(request_id=request_id, grade=grade)
    assert (await error_of(stub.SubmitFeedback(request)))[1].reason == reason


async def test_the_audit_holds_hashes_and_text_only_where_asked_for(
    nats_url: str, model_folder: Path
) -> None:
    entries = []
    for tenants in (frozenset[str](), frozenset({"default"})):
        kept = RecordsSettings(audit_key=KEY, audit_text_tenants=tenants)
        async with open_wire(nats_url, model_folder, safety=SAFETY, records=kept) as wire:
            request_id = await answered(wire, f"pay to {IBAN}")
            await explained(wire, request_id)
            entries.append(await audited(nats_url, request_id))
    without, with_text = entries
    assert [(d.rule, d.action, d.count) for d in without.decisions] == [("pii.iban", "redact", 1)]
    assert len(without.prompt_hmac) == 32
    assert without.prompt_hmac == with_text.prompt_hmac
    assert not without.turns
    assert with_text.turns == ["pay to <IBAN_1>"]


async def test_the_audit_is_written_when_the_prompt_is_decided(
    nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, safety=SAFETY) as wire:
        await explained(wire, await answered(wire, "nothing to find"))
        call = wire.stub.Generate(prompt(f"pay to {IBAN}"))
        task = await wire.batcher.task()
        entry = await audited(nats_url, task.request_id)
        assert [(d.rule, d.action) for d in entry.decisions] == [("pii.iban", "redact")]
        call.cancel()
    client = await nats.connect(nats_url)
    try:
        js = client.jetstream()
        assert (await js.stream_info(subjects.AUDIT_STREAM)).state.messages == 1
        with pytest.raises(nats.js.errors.APIError):
            await js.delete_msg(subjects.AUDIT_STREAM, 1)
    finally:
        await client.close()


async def test_a_request_that_cannot_be_audited_is_refused(
    nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, safety=SAFETY) as wire:
        wire.gateway.store.audit_writer.is_full = True
        code, error = await error_of(wire.stub.Generate(prompt("my number is 078-05-1121")))
    assert (code.name, error.reason) == ("UNAVAILABLE", "TRANSPORT_UNAVAILABLE")
    assert error.retry_after_s


@pytest.mark.parametrize("reason", ["CANCELLED", "DEADLINE_EXCEEDED"])
async def test_what_ends_during_its_admission_is_recorded_and_counted(
    nats_url: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    begun = asyncio.Event()

    async def endless(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    limit_s = 1.0 if reason == "DEADLINE_EXCEEDED" else 60.0
    async with open_wire(nats_url, model_folder, default_timeout_s=limit_s) as wire:
        monkeypatch.setattr("gateway.admission.admission.Admission.admit", endless)
        call = wire.stub.Generate(prompt(), metadata=(("sluice-tenant", "acme"),))
        reading = asyncio.ensure_future(error_of(call))
        await asyncio.wait_for(begun.wait(), BOUND_S)
        if reason == "CANCELLED":
            call.cancel()
        else:
            _, error = await reading
            record = (await explained(wire, error.metadata["request_id"])).record
            assert (record.error_reason, record.tenant) == (reason, "acme")
        outcome = ("sluice.outcome", reason)
        await wire.until(
            lambda: any(outcome in labels for labels in values(wire.metrics, "sluice.requests"))
        )
        await asyncio.wait([reading])
    assert [record.error_reason for record in await recorded(nats_url)] == [reason]


async def recorded(nats_url: str) -> list[RequestRecord]:
    """All records that were written; the gateway has drained."""
    client = await nats.connect(nats_url)
    try:
        js, subject = client.jetstream(), f"{subjects.RECORDS}.*.request.*.*"
        messages = stored_messages(js, subjects.RECORDS_STREAM, subject, BOUND_S)
        return [RequestRecord.FromString(message.data) async for message in messages]
    finally:
        await client.close()


async def audited(nats_url: str, request_id: str) -> AuditEntry:
    client = await nats.connect(nats_url)
    try:
        subject = subjects.audit("default", request_id)
        async with asyncio.timeout(BOUND_S):
            while True:
                try:
                    message = await client.jetstream().get_last_msg(
                        subjects.AUDIT_STREAM, subject, direct=True
                    )
                    return AuditEntry.FromString(message.data or b"")
                except nats.js.errors.NotFoundError:
                    await asyncio.sleep(0.01)
    finally:
        await client.close()
