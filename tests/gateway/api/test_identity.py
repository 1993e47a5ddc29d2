"""Who may call what, over the real wire: every way in without credentials, and from one tenant to another."""

import asyncio
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_reflection.v1alpha import reflection_pb2_grpc

from cli.main import run
from sluice.errors import SluiceError
from sluice.internal.v1.items_pb2 import RunRequest
from sluice.internal.v1.items_pb2_grpc import ItemsServiceStub
from sluice.settings import RecordsSettings
from sluice.v1 import admin_pb2, jobs_pb2, safety_pb2
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.jobs_pb2_grpc import JobServiceStub
from tests.gateway.kit.batcher import last
from tests.gateway.kit.http import CHAT, Connection, ask
from tests.gateway.kit.issuer import Issuer, bearer
from tests.gateway.kit.secured import Secured, secured
from tests.gateway.kit.wire import (
    Wire,
    error_of,
    events_of,
    prompt,
    resumed,
    text_of,
    tokens_of,
)

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


async def refusal(call: Any) -> tuple[str, SluiceError]:
    code, error = await error_of(call)
    assert error.reason == code.name
    return code.name, error


def every_call(wire: Wire, metadata: Any) -> dict[str, Any]:
    """One call of each kind that is answered by a service of ours or by reflection."""
    admin: Any = AdminServiceStub(wire.channel)
    jobs: Any = JobServiceStub(wire.channel)
    items: Any = ItemsServiceStub(wire.channel)
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(wire.channel)
    return {
        "generate": wire.stub.Generate(prompt(), metadata=metadata),
        "text": wire.stub.GenerateText(prompt(), metadata=metadata),
        "count": wire.stub.CountTokens(pb.CountTokensRequest(prompt="x"), metadata=metadata),
        "models": wire.stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
        "check": wire.safety.CheckText(safety_pb2.CheckTextRequest(text="x"), metadata=metadata),
        "dry_run": wire.safety.GetDryRun(safety_pb2.GetDryRunRequest(), metadata=metadata),
        "record": admin.GetRequestRecord(
            admin_pb2.GetRequestRecordRequest(request_id="r"), metadata=metadata
        ),
        "outcomes": admin.StreamOutcomes(admin_pb2.StreamOutcomesRequest(), metadata=metadata),
        "drift": admin.GetRouterHealth(admin_pb2.GetRouterHealthRequest(), metadata=metadata),
        "jobs": jobs.ListJobs(jobs_pb2.ListJobsRequest(), metadata=metadata),
        # Without a request: gRPC may tell of one that it could not send, and not of the answer.
        "items": items.Run(iter(()), metadata=metadata),
        "reflection": reflection.ServerReflectionInfo(iter(()), metadata=metadata),
    }


async def test_nothing_but_health_answers_a_stranger(mesh: Secured) -> None:
    assert await mesh.wire.health("") in (SERVING, NOT_SERVING)
    strangers: list[Any] = [
        (),
        (("sluice-tenant", "acme"),),
        (("authorization", "Basic YTpi"),),
        bearer("slc_000000000000_" + "a" * 56),
        bearer(mesh.issuer.token(exp=1)),
        bearer(Issuer().token()),
        bearer(mesh.issuer.token(aud="another")),
        bearer("x" * 7000),
    ]
    for metadata in strangers:
        for name, call in every_call(mesh.wire, metadata).items():
            assert (await refusal(call))[0] == "UNAUTHENTICATED", name
    assert len(mesh.wire.gateway.registry) == 0


async def test_keys_and_tokens_make_the_calls_of_their_tenant(mesh: Secured) -> None:
    for name in ("acme", "token"):
        for _ in range(2):  # known the second time
            call = mesh.wire.stub.Generate(prompt(), metadata=mesh[name])
            task = await mesh.wire.batcher.task()
            assert task.tenant == "acme"
            await mesh.wire.batcher.send(task, last(0, mesh.wire.tokens("hello")))
            assert text_of(await events_of(call)) == "hello"


async def test_a_key_holds_once_its_command_has_returned(
    nats_url: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "sluice.yaml"
    config.write_text(f"nats: {{url: '{nats_url}'}}\nidentity: {{api_keys: true}}\n")

    async def keys(*words: str) -> str:
        command = ["keys", *words, "--config", str(config)]
        assert await asyncio.to_thread(run, command) == 0, capsys.readouterr()
        return capsys.readouterr().out.strip()

    async with (
        secured(nats_url, model_folder, tmp_path) as one,
        secured(nats_url, model_folder, tmp_path, gateway_id="gw2") as two,
    ):
        for mesh, other in ((one, "gw2"), (two, "gw1")):
            # The command asks until each has answered that another one knows.
            peers = mesh.wire.gateway.shared.peers
            await mesh.wire.until(lambda peers=peers, other=other: other in peers.alive)  # type: ignore[misc]
            # No look of their own.
            mesh.wire.gateway.authenticator.identities.bucket.run = asyncio.Event().wait  # type: ignore[method-assign,union-attr]
            mesh.wire.gateway.authenticator.use(mesh.wire.gateway.authenticator.identities)
        for _ in range(3):
            made = await keys("create", "acme")
            assert [await models_of(mesh, bearer(made)) for mesh in (one, two)] == ["OK", "OK"]
            await keys("revoke", made.split("_")[1])
            refused = [await models_of(mesh, bearer(made)) for mesh in (one, two)]
            assert refused == ["UNAUTHENTICATED"] * 2


async def models_of(mesh: Secured, metadata: Any) -> str:
    return await ended(mesh.wire.stub.ListModels(pb.ListModelsRequest(), metadata=metadata))


USES = "generate text count models check record outcomes jobs reflection"
READS = "models dry_run record outcomes drift jobs reflection"
ALLOWED = {"acme": USES.split(), "operator": READS.split(), "auditor": READS.split()}


@pytest.mark.parametrize("name", ALLOWED)
async def test_roles_say_what_may_be_called(mesh: Secured, name: str) -> None:
    calls = every_call(mesh.wire, mesh[name])
    for method in ("generate", "text"):
        if method in ALLOWED[name]:
            calls.pop(method).cancel()  # it waits for its answer
    outcomes = {method: await ended(call) for method, call in calls.items()}
    denied = {method for method, code in outcomes.items() if code == "PERMISSION_DENIED"}
    assert denied == calls.keys() - {*ALLOWED[name]}, outcomes


async def ended(call: Any) -> str:
    """The name of the code with which a call ends, or OK when it begins to answer."""
    try:
        await (call.read() if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as failed:
        return failed.code().name
    return "OK"


@pytest.mark.wire(records=RecordsSettings())
async def test_a_request_of_another_tenant_is_unknown(mesh: Secured) -> None:
    request_id, _ = await mesh.answered("acme", text="mail a@example.org")
    admin: Any = AdminServiceStub(mesh.wire.channel)
    record = admin_pb2.GetRequestRecordRequest(request_id=request_id)
    audit = admin_pb2.GetAuditEntryRequest(request_id=request_id)
    grade = admin_pb2.SubmitFeedbackRequest(request_id=request_id, grade=0.5)

    await mesh.wire.gateway.store.flush(5.0)
    for name in ("acme", "operator", "auditor"):
        found = await admin.GetRequestRecord(record, metadata=mesh[name])
        assert found.record.tenant == "acme"
    unknown = admin_pb2.GetRequestRecordRequest(request_id="req-unknown")
    _, never = await error_of(admin.GetRequestRecord(unknown, metadata=mesh["other"]))
    for call in (
        admin.GetRequestRecord(record, metadata=mesh["other"]),
        admin.GetAuditEntry(audit, metadata=mesh["other"]),
        admin.SubmitFeedback(grade, metadata=mesh["other"]),
    ):
        code, error = await error_of(call)
        assert (code.name, error.reason, error.message) == (
            "NOT_FOUND",
            "RECORD_UNKNOWN",
            never.message,
        )
    await admin.SubmitFeedback(grade, metadata=mesh["acme"])
    assert (await refusal(admin.SubmitFeedback(grade, metadata=mesh["auditor"])))[0] == (
        "PERMISSION_DENIED"
    )


async def test_keys_and_answers_of_another_tenant_are_out_of_reach(mesh: Secured) -> None:
    wire = mesh.wire
    request = prompt(idempotency_key="invoice-1")
    first, task = await wire.begin(request, metadata=mesh["acme"])
    events = await wire.end(first, task, "secret")

    # The same key and request: another tenant's is a request of its own, and neither replayed nor joined.
    theirs, own = await wire.begin(request, metadata=mesh["other"])
    assert (own.tenant, own.request_id != task.request_id) == ("other", True)
    assert text_of(await wire.end(theirs, own, "hello")) == "hello"

    # Who has not been sent the tokens cannot continue them, whoever's they are.
    forged = resumed(prompt(), tokens_of(events))
    forged.resume.resume_token = b"\x00" * len(forged.resume.resume_token)
    code, error = await error_of(wire.stub.Generate(forged, metadata=mesh["other"]))
    assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
    assert [one.field for one in error.violations] == ["resume.resume_token"]


OUTCOMES: Final = {"tenants": ["acme", "other"], "pair": ["small", "large"]}


@pytest.mark.wire(routing={"default": "small", "outcomes": OUTCOMES})
async def test_outcomes_of_others_need_a_role(mesh: Secured) -> None:
    admin: Any = AdminServiceStub(mesh.wire.channel)
    asked = admin_pb2.StreamOutcomesRequest(tenants=["other"])
    assert (await refusal(admin.StreamOutcomes(asked, metadata=mesh["acme"])))[0] == (
        "PERMISSION_DENIED"
    )
    for name, tenants in (("acme", ["acme"]), ("acme", []), ("auditor", ["other"])):
        asked = admin_pb2.StreamOutcomesRequest(tenants=tenants)
        assert await admin.StreamOutcomes(asked, metadata=mesh[name]).read() is grpc.aio.EOF


async def test_items_of_jobs_come_from_the_mesh_for_any_tenant(mesh: Secured) -> None:
    stub: Any = ItemsServiceStub(mesh.wire.channel)
    call = stub.Run(metadata=(*mesh["mesh"], ("sluice-tenant", "acme")))
    await call.write(RunRequest(id=1, request=prompt(priority=pb.PRIORITY_BULK)))
    assert (await mesh.wire.batcher.task(priority_class="bulk")).tenant == "acme"
    call.cancel()


@pytest.mark.wire(http="127.0.0.1:0")
async def test_http_takes_keys_as_anthropics_clients_send_them(mesh: Secured) -> None:
    body = {"model": "small", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    path = "/v1/messages"
    acme, wrong = mesh.keys["acme"], {"authorization": "Bearer slc_x"}
    for headers in (
        {},
        {"x_api_key": ""},
        {"x_api_key": "slc_x"},
        {"x_api_key": acme, **wrong},
    ):
        reply = await ask(mesh.wire.http, path, body, **headers)
        assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
        assert "www-authenticate" in reply.headers
    reply = await ask(mesh.wire.http, path, body, x_api_key=mesh.keys["auditor"])
    assert (reply.status, reply.json["error"]["type"]) == (403, "permission_error")
    for headers in ({"x_api_key": acme}, {"authorization": f"Bearer {acme}"}):
        asking = asyncio.ensure_future(ask(mesh.wire.http, path, body, **headers))
        task = await mesh.wire.batcher.task()
        assert task.tenant == "acme"
        await mesh.wire.batcher.send(task, last(0, mesh.wire.tokens("hello")))
        assert (await asking).status == 200


@pytest.mark.wire(http="127.0.0.1:0")
async def test_http_asks_who_calls_as_grpc_does(mesh: Secured) -> None:
    assert mesh.wire.http is not None
    connection = await Connection.to(mesh.wire.http)
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    forged = {"authorization": f"Bearer {mesh.keys['acme']}", "sluice-tenant": "other"}
    for headers, status in (
        ({}, 401),
        ({"sluice_tenant": "acme"}, 401),
        ({"authorization": "Bearer slc_x"}, 401),
        (forged, 403),
        ({"authorization": f"Bearer {mesh.keys['auditor']}"}, 403),
    ):
        await connection.send(CHAT, body, **headers)
        reply = await connection.reply()
        assert reply.status == status, headers
        assert ("www-authenticate" in reply.headers) is (status == 401)
    await connection.send("/v1/models", body, "GET")
    assert (await connection.reply()).status == 401
    await connection.send("/health", body, "GET")
    assert (await connection.reply()).status in (200, 503)

    await connection.send(CHAT, body, authorization=f"Bearer {mesh.keys['token']}")
    task = await mesh.wire.batcher.task()
    assert task.tenant == "acme"
    await mesh.wire.batcher.send(task, last(0, mesh.wire.tokens("hello")))
    assert (await connection.reply()).status == 200
    connection.writer.close()
