"""What is kept of callers: nothing of keys and prompts in logs, spans and errors; all of a tenant can be deleted."""

import logging
from typing import Any

import grpc
import nats
import pytest

from sluice.internal.v1.task_pb2 import Task
from sluice.v1 import admin_pb2
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.wire import subjects
from sluice.wire.dead_letters import store_dead_letter
from tests.gateway.kit.batcher import last
from tests.gateway.kit.issuer import Issuer, bearer
from tests.gateway.kit.secured import Secured
from tests.gateway.kit.wire import error_of, events_of, prompt, text_of

PROMPT = "canary.prompt@example.org"
SAFETY = {"policies": {"default": {"actions": {"pii.*": "flag"}}}}


async def asked(mesh: Secured, name: str, key: str = "") -> str:
    """The id of a request of ``name`` with the canary, which is answered."""
    call = mesh.wire.stub.Generate(prompt(PROMPT, idempotency_key=key), metadata=mesh[name])
    task = await mesh.wire.batcher.task()
    await mesh.wire.batcher.send(task, last(0, mesh.wire.tokens("hello")))
    assert text_of(await events_of(call)) == "hello"
    return str(task.request_id)


@pytest.mark.wire(safety=SAFETY)
async def test_keys_and_prompts_are_in_no_log_span_or_error(
    mesh: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    stub = mesh.wire.stub
    told = [await asked(mesh, "acme", "one"), await asked(mesh, "token")]
    stranger, expired = Issuer().token(), mesh.issuer.token(exp=1)
    wrong = mesh.keys["acme"][:-1] + ("a" if mesh.keys["acme"][-1] != "a" else "b")
    calls = [
        stub.Generate(prompt(PROMPT), metadata=bearer(one))
        for one in (wrong, stranger, expired, PROMPT)
    ]
    forged = (*mesh["acme"], ("sluice-tenant", "other"))
    calls += [
        stub.Generate(prompt(PROMPT), metadata=forged),
        stub.Generate(prompt(PROMPT), metadata=mesh["auditor"]),
        stub.Generate(prompt(PROMPT + " x" * 40_000), metadata=mesh["acme"]),
        stub.Generate(
            prompt(PROMPT, sampling=pb.SamplingParams(max_tokens=0)), metadata=mesh["acme"]
        ),
        stub.Generate(prompt(PROMPT + " 2", idempotency_key="one"), metadata=mesh["acme"]),
    ]
    for call in calls:
        _, error = await error_of(call)
        told.append(error.to_status().SerializeToString().decode(errors="replace"))
    call = stub.Generate(prompt(PROMPT, model=PROMPT), metadata=mesh["acme"])
    assert PROMPT in str((await error_of(call))[1])  # its own caller alone reads the name
    await mesh.wire.gateway.store.flush(5.0)
    spans = [span.to_json() for span in mesh.wire.spans.get_finished_spans()]
    assert spans
    secrets = [PROMPT, stranger, expired, wrong, *mesh.keys.values()]
    for text in (*told, *spans, caplog.text):
        for secret in secrets:
            assert secret not in text
            assert secret[-24:] not in text


@pytest.mark.wire(safety=SAFETY)
async def test_forgetting_a_tenant_deletes_only_its_data(mesh: Secured, nats_url: str) -> None:
    admin: Any = AdminServiceStub(mesh.wire.channel)
    gone = [await asked(mesh, "acme", "one"), await asked(mesh, "token")]
    stays = await asked(mesh, "other", "one")
    client = await nats.connect(nats_url)
    for tenant in ("acme", "other"):
        task = Task(request_id="r", tenant=tenant).SerializeToString()
        await store_dead_letter(client, "small", "bulk", task, None, "tested")
    await mesh.wire.gateway.store.flush(5.0)
    running = mesh.wire.stub.Generate(prompt(), metadata=mesh["acme"])
    await mesh.wire.batcher.task()

    request = admin_pb2.ForgetTenantRequest(tenant="acme")
    code, _ = await error_of(admin.ForgetTenant(request, metadata=mesh["acme"]))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    done = await admin.ForgetTenant(request, metadata=mesh["operator"])
    assert (done.api_keys, done.cancelled, done.dead_letters) == (1, 1, 1)
    assert (done.records, done.audit_entries) == (3, 2)
    assert not done.unreached_gateways
    code, _ = await error_of(running)
    assert code is grpc.StatusCode.CANCELLED
    for request_id in gone:
        asked_for = admin_pb2.GetRequestRecordRequest(request_id=request_id)
        code, _ = await error_of(admin.GetRequestRecord(asked_for, metadata=mesh["auditor"]))
        assert code is grpc.StatusCode.NOT_FOUND
    asked_for = admin_pb2.GetRequestRecordRequest(request_id=stays)
    assert (await admin.GetRequestRecord(asked_for, metadata=mesh["other"])).record.tenant
    js = client.jetstream()
    assert (await js.stream_info(subjects.DEAD_LETTERS_STREAM)).state.messages == 1
    left = await js.stream_info(subjects.KEYS_BUCKET, subjects_filter=">")
    assert all(".other." in subject for subject in left.state.subjects or {})
    # Its key works no more, and what it asks again is computed again.
    await mesh.wire.until(lambda: not _knows(mesh, "acme"))
    code, _ = await error_of(mesh.wire.stub.Generate(prompt(), metadata=mesh["acme"]))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    again = mesh.wire.stub.Generate(prompt(PROMPT, idempotency_key="one"), metadata=mesh["token"])
    await mesh.wire.batcher.send(await mesh.wire.batcher.task(), last(0, mesh.wire.tokens("x")))
    assert text_of(await events_of(again)) == "x"
    await client.close()


def _knows(mesh: Secured, tenant: str) -> bool:
    bucket = mesh.wire.gateway.authenticator.identities.bucket
    assert bucket is not None
    return any(record.tenant == tenant for record in bucket.records.values())
