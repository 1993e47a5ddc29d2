"""Limits of tenants over the real wire: gRPC, HTTP, operators, a reload, two gateways."""

import asyncio
import gzip
from typing import Any, Final

import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError

from cli.main import run
from sluice.errors import LimitReached, ModelUnavailable
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import Settings, TenantSettings
from sluice.settings.limits import LimitSettings
from sluice.v1 import admin_pb2
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.v1.safety_pb2 import CheckTextRequest
from sluice.wire.codec import unpack
from tests.gateway.kit.batcher import last
from tests.gateway.kit.http import CHAT, Connection, ask
from tests.gateway.kit.wire import Opened, Wire, error_of, events_of, prompt
from tests.support.settings import tuned

ACME = (("sluice-tenant", "acme"),)


def acme(burst_s: float = 60, **limits: Any) -> dict[str, Any]:
    """The setting of a tenant with limits."""
    return {"acme": {"limits": tuned(LimitSettings, burst_s=burst_s, **limits)}}


ONE = acme(requests_per_minute=1)
REQUESTS: Final[dict[str, Any]] = {
    "Generate": prompt(),
    "Score": pb.ScoreRequest(prompt="hello", answers=["you"], model="small"),
}
BODY = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}


async def answered(wire: Wire, request: pb.GenerateRequest | None = None) -> str:
    """The model that answers a request of acme."""
    call = wire.stub.Generate(request or prompt(), metadata=ACME)
    model = (request or prompt()).model
    task = await wire.batcher.task("large" if model == "large" else "small")
    started = (await wire.end(call, task, "hello"))[0].started
    return str(started.model)


async def listed(wire: Wire) -> dict[str, float]:
    admin: Any = AdminServiceStub(wire.channel)
    found = await admin.ListTenants(admin_pb2.ListTenantsRequest(tenant="acme"))
    (tenant,) = found.tenants
    return {use.name: use.used for use in tenant.limits}


@pytest.mark.wire(tenants=ONE)
async def test_a_limit_that_is_reached_is_told_with_its_time(wire: Wire) -> None:
    await answered(wire)
    with pytest.raises(AioRpcError) as refused:
        await wire.stub.GenerateText(prompt(), metadata=ACME)
    code, error = await error_of(wire.stub.Generate(prompt(), metadata=ACME))
    assert code.name == "RESOURCE_EXHAUSTED"
    assert isinstance(error, LimitReached)
    assert error.retry_after_s is not None
    assert 50 < error.retry_after_s <= 60
    trailer = dict(refused.value.trailing_metadata() or ())["grpc-status-details-bin"]
    failure = error_details_pb2.QuotaFailure()
    details = status_pb2.Status.FromString(trailer).details
    assert any(one.Unpack(failure) for one in details)
    assert failure.violations[0].subject == "tenant acme"
    assert (await listed(wire))["requests_per_minute"] == pytest.approx(1.0, abs=0.1)
    # Others are not limited.
    other = wire.stub.Generate(prompt())
    await wire.batcher.send(await wire.batcher.task(), last(0, wire.tokens("hello")))
    await events_of(other)


@pytest.mark.wire(tenants=ONE, http="127.0.0.1:0")
async def test_http_has_429_and_headers(wire: Wire) -> None:
    assert wire.http is not None
    connection = await Connection.to(wire.http)
    await connection.send(CHAT, BODY, sluice_tenant="acme")
    await wire.batcher.send(await wire.batcher.task(), last(0, wire.tokens("hello")))
    first = await connection.reply()
    assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    await connection.send(CHAT, BODY, sluice_tenant="acme")
    second = await connection.reply()
    assert second.status == 429
    assert second.error["code"] == "rate_limit_exceeded"
    assert 50 < int(second.headers["retry-after"]) <= 60
    assert second.headers["x-ratelimit-limit-requests"] == "1"
    connection.writer.close()


@pytest.mark.wire(tenants=acme(3600, tokens_per_minute=1.0))
async def test_tokens_are_settled_when_the_answer_has_ended(wire: Wire) -> None:
    request = prompt(sampling=pb.SamplingParams(max_tokens=40))
    call, task = await wire.begin(request, metadata=ACME)
    held = (await listed(wire))["tokens_per_minute"]
    assert held == pytest.approx(len(task.prompt_token_ids) + 40, abs=1)
    await wire.end(call, task, "hello")
    used = len(task.prompt_token_ids) + len(wire.tokens("hello"))
    assert (await listed(wire))["tokens_per_minute"] == pytest.approx(used, abs=1)

    cancelled = wire.stub.Generate(request, metadata=ACME)
    await wire.batcher.hold(await wire.batcher.task())
    cancelled.cancel()
    await wire.until(lambda: not len(wire.gateway.registry))
    assert (await listed(wire))["tokens_per_minute"] < used + 40


@pytest.mark.wire(tenants=ONE)
async def test_a_reload_changes_limits(wire: Wire) -> None:
    await answered(wire)
    _, error = await error_of(wire.stub.Generate(prompt(), metadata=ACME))
    assert isinstance(error, LimitReached)
    limits = LimitSettings(requests_per_minute=100)
    changed: Settings = wire.settings.model_copy(
        update={"tenants": {"acme": TenantSettings(limits=limits)}}
    )
    await wire.reload(changed)
    await answered(wire)


async def test_gateways_share_a_limit(opened: Opened) -> None:
    async with opened(tenants=ONE) as one, opened(tenants=ONE, gateway_id="gw2") as two:
        await two.until(lambda: "gw1" in two.gateway.shared.peers.alive)
        await answered(one)
        await one.gateway.shared.peers.send_heartbeat()
        await two.until(lambda: bool(two.gateway.limits.buckets))
        _, error = await error_of(two.stub.Generate(prompt(), metadata=ACME))
        assert isinstance(error, LimitReached)


async def test_the_commands_show_the_use_and_forget_a_tenant(
    opened: Opened, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLUICE_API_KEY", raising=False)
    async with opened(tenants=ONE) as wire:
        address = ("--address", wire.gateway.address)
        await answered(wire)
        assert await asyncio.to_thread(run, ["tenants", "list", *address]) == 0
        header, row = capsys.readouterr().out.splitlines()
        assert header.split() == ["tenant", "running", "USD", "last", "hour", "limit", "used", "of"]
        assert row.split()[0] == "acme"
        name, used, limit = row.split()[3:]
        assert (name, limit) == ("requests_per_minute", "1")
        assert float(used) == pytest.approx(1.0, abs=0.1)
        assert await asyncio.to_thread(run, ["tenants", "forget", "acme", "--yes", *address]) == 0
        deleted = dict(line.split() for line in capsys.readouterr().out.splitlines())
        assert deleted["records"] == "1"
        words = ["tenants", "forget", "a.b", "--yes", *address]
        assert await asyncio.to_thread(run, words) == 1
        assert "REQUEST_INVALID" in capsys.readouterr().err


@pytest.mark.wire(tenants=acme(requests_per_minute=2))
async def test_what_no_model_sees_counts_as_requests(wire: Wire) -> None:
    await wire.stub.CountTokens(pb.CountTokensRequest(prompt="hi"), metadata=ACME)
    await wire.safety.CheckText(CheckTextRequest(text="hi"), metadata=ACME)
    for call in (
        wire.stub.CountTokens(pb.CountTokensRequest(prompt="hi"), metadata=ACME),
        wire.safety.CheckText(CheckTextRequest(text="hi"), metadata=ACME),
    ):
        with pytest.raises(AioRpcError, match="requests_per_minute of 2 is reached"):
            await call


MESSAGE_BYTES: Final = 4096
WRONG: Final[list[tuple[str, bytes]]] = [
    *(
        (f"InferenceService/{method}", request.SerializeToString())
        for method, request in (
            ("GenerateText", prompt(sampling=pb.SamplingParams(temperature=9))),
            ("GenerateText", prompt(model="nope")),
            ("GenerateText", prompt("x " * 1000)),
            ("Embed", pb.EmbedRequest(texts=[""])),
            ("CountTokens", pb.CountTokensRequest(prompt="")),
        )
    ),
    *(
        (method, message)
        for method in ("InferenceService/GenerateText", "SafetyService/CheckText")
        for message in (b"\xff", prompt("x" * MESSAGE_BYTES).SerializeToString())
    ),
]


@pytest.mark.wire(
    tenants={f"t{number}": ONE["acme"] for number, _ in enumerate(WRONG)},
    max_message_bytes=MESSAGE_BYTES,
)
async def test_requests_refused_for_their_content_count(wire: Wire) -> None:
    for number, (method, message) in enumerate(WRONG):
        send: Any = wire.channel.unary_unary(f"/sluice.v1.{method}")
        tenant = (("sluice-tenant", f"t{number}"),)
        with pytest.raises(AioRpcError) as refused:
            await send(message, metadata=tenant)
        assert refused.value.code() in (StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND), method
        with pytest.raises(AioRpcError, match="requests_per_minute of 1 is reached"):
            await send(message, metadata=tenant)


@pytest.mark.wire(tenants=ONE)
async def test_messages_without_a_model_do_not_count(wire: Wire) -> None:
    send: Any = wire.channel.unary_unary("/sluice.v1.InferenceService/ListModels")
    for _ in range(2):
        with pytest.raises(AioRpcError) as refused:
            await send(b"\xff", metadata=ACME)
        assert refused.value.code() is StatusCode.INVALID_ARGUMENT
    assert (await listed(wire))["requests_per_minute"] == 0


SPEECH: Final = "/v1/audio/transcriptions"
BODIES: Final[dict[str, tuple[str, Any, dict[str, str]]]] = {
    "unknown field": (CHAT, BODY | {"colour": 1}, {}),
    "unknown model": (CHAT, BODY | {"model": "nope"}, {}),
    "no JSON": (CHAT, b"{", {}),
    "no object": (CHAT, b"[]", {}),
    "other type": (CHAT, BODY, {"content_type": "text/plain"}),
    "other encoding": (CHAT, BODY, {"content_encoding": "br"}),
    "no gzip": (CHAT, b"{}", {"content_encoding": "gzip"}),
    "too large": (CHAT, b" " * (MESSAGE_BYTES + 1), {}),
    "expands too far": (
        CHAT,
        gzip.compress(bytes(MESSAGE_BYTES + 1)),
        {"content_encoding": "gzip"},
    ),
    "no deadline": (CHAT, BODY, {"x_sluice_timeout": "soon"}),
    "audio without a model": (SPEECH, b"x", {}),
    "no document": ("/v1/rerank", {"model": "small", "query": "q"}, {}),
}


@pytest.mark.wire(
    tenants={f"t{number}": acme(requests_per_minute=2)["acme"] for number, _ in enumerate(BODIES)},
    http="127.0.0.1:0",
    max_message_bytes=MESSAGE_BYTES,
)
async def test_http_bodies_refused_for_their_content_count(wire: Wire) -> None:
    for number, (name, (path, wrong, headers)) in enumerate(BODIES.items()):
        tenant = f"t{number}"
        replies = [
            await ask(wire.http, path, wrong, sluice_tenant=tenant, **headers) for _ in range(3)
        ]
        statuses = [reply.status for reply in replies]
        assert all(400 <= status < 500 and status != 429 for status in statuses[:2]), name
        assert statuses[2] == 429, name
        models = await ask(wire.http, "/v1/models", method="GET", sluice_tenant=tenant)
        assert models.status == 200


async def fails_without(wire: Wire, method: str, *, is_taken: bool) -> None:
    """A request of acme fails for want of a batcher, before or after one had it."""
    call = getattr(InferenceServiceStub(wire.channel), method)(REQUESTS[method], metadata=ACME)
    task = unpack(Task, (await wire.batcher.arrived()).data)
    if is_taken:
        await wire.batcher.hold(task)
        await wire.until(lambda: wire.has_batcher(task))
    wire.gateway.registry.by_run[task.request_id].fail_run(
        task.request_id, ModelUnavailable("no batcher")
    )
    assert (await error_of(call))[0] is StatusCode.UNAVAILABLE


@pytest.mark.parametrize("method", REQUESTS)
@pytest.mark.parametrize("is_taken", [False, True])
async def test_request_counts_once_a_batcher_has_it(
    opened: Opened, method: str, is_taken: bool
) -> None:
    rate = {"requests_per_minute": 2}
    async with opened(tenants=acme(**rate, models={"small": rate})) as wire:
        for _ in range(2):
            await fails_without(wire, method, is_taken=is_taken)
        used = (await listed(wire))["requests_per_minute"]
        assert used == pytest.approx(2.0 if is_taken else 0.0, abs=0.2)
        if is_taken:
            _, error = await error_of(wire.stub.Generate(prompt(), metadata=ACME))
            assert isinstance(error, LimitReached)
        else:
            await answered(wire)


@pytest.mark.wire(
    tenants=acme(requests_per_minute=2, soft={"share": 0.4, "model": "small"}),
    routing={"default": "large"},
    prices={"small": (1, 1), "large": (2, 2)},
)
async def test_soft_limit_degrades_routed_requests_only(wire: Wire) -> None:
    assert await answered(wire, prompt(model="large")) == "large"
    assert await answered(wire, prompt(model="auto")) == "small"
