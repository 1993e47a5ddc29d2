"""The other methods, health, reflection, spans, and the way out."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry.trace import SpanKind

from sluice.internal.v1.task_pb2 import Task
from sluice.startup import free_port
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from supervisor.nats import wait_for_nats
from tests.gateway.kit.batcher import BOUND_S, frame, last
from tests.gateway.kit.tokenizer import CONTEXT
from tests.gateway.kit.wire import (
    Opened,
    Wire,
    error_of,
    events_of,
    is_served,
    open_wire,
    prompt,
    text_of,
)
from tests.support.nats import START_S, nats_process, running_nats
from tests.support.proxy import Proxy

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "sluice.v1.InferenceService"


async def test_tokens_are_counted_as_generate_counts_them(wire: Wire) -> None:
    counted = await wire.stub.CountTokens(pb.CountTokensRequest(prompt="hello world"))
    call, task = await wire.begin(prompt("hello world"))
    assert counted.token_count == len(task.prompt_token_ids)
    assert (counted.context_tokens, counted.model) == (CONTEXT, "small")
    call.cancel()


async def test_models_are_listed_with_their_load(wire: Wire) -> None:
    await wire.batcher.report("small", slots=8)
    await wire.until(lambda: not is_served(wire.gateway, "large"))
    answer = await wire.stub.ListModels(pb.ListModelsRequest())
    small, large = answer.models
    assert (small.name, small.tier, small.ready, small.slots, small.queued) == (
        "small",
        "small",
        True,
        8,
        2,
    )
    assert (large.name, large.ready) == ("large", False)
    assert small.context_tokens == CONTEXT


async def test_health_of_an_unknown_service_is_not_found(wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await wire.health("nope")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_models_come_in_pages(wire: Wire) -> None:
    first = await wire.stub.ListModels(pb.ListModelsRequest(page_size=1))
    assert [model.name for model in first.models] == ["small"]
    second = await wire.stub.ListModels(
        pb.ListModelsRequest(page_size=1, page_token=first.next_page_token)
    )
    assert [model.name for model in second.models] == ["large"]
    assert second.next_page_token == ""
    code, error = await error_of(wire.stub.ListModels(pb.ListModelsRequest(page_token="x")))
    assert (code.name, error.violations[0].field) == ("INVALID_ARGUMENT", "page_token")


async def test_the_service_is_ready_while_a_model_can_answer(wire: Wire) -> None:
    for service in ("", SERVICE, "model.small", "model.large"):
        await wire.health_becomes(service, SERVING)
    await wire.batcher.report("small")
    await wire.health_becomes("model.large", NOT_SERVING)
    for service in ("", SERVICE, "model.small"):
        assert await wire.health(service) == SERVING, service
    await wire.batcher.report()
    for service in ("", SERVICE, "model.small"):
        await wire.health_becomes(service, NOT_SERVING)
    await wire.batcher.report("large")
    for service in ("", SERVICE, "model.large"):
        await wire.health_becomes(service, SERVING)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services(wire: Wire, version: str) -> None:
    call: Any = wire.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert {
        SERVICE,
        "grpc.health.v1.Health",
        f"grpc.reflection.{version}.ServerReflection",
    } <= listed
    packages = dict[str, str]()
    for symbol in (*listed, f"{SERVICE}.Generate", "sluice.v1.GenerateRequest"):
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        described = (await call.read()).file_descriptor_response.file_descriptor_proto
        assert described, symbol
        for file in map(FileDescriptorProto.FromString, described):
            assert packages.setdefault(file.name, file.package) == file.package
    for symbol in (f"{SERVICE}.Nothing", "Nothing"):
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        assert (await call.read()).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    call.cancel()


async def test_the_spans_of_a_request_form_one_trace(wire: Wire) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    metadata = (("traceparent", f"00-{trace_id}-{parent_id}-01"),)
    call = wire.stub.Generate(prompt(), metadata=metadata)
    message = await wire.batcher.message()
    task = Task.FromString(message.data)
    await wire.batcher.send(task, frame(0, wire.tokens("hello")), last(len(wire.tokens("hello"))))
    events = await events_of(call)
    assert events[0].started.trace_id == trace_id
    await wire.until(lambda: wire.span(names.SPAN_GENERATE) is not None)
    server = wire.span(names.SPAN_GENERATE)
    assert server is not None
    assert server.kind is SpanKind.SERVER
    assert format(server.parent.span_id, "016x") == parent_id
    for name in ("safety", "route", "tokenize", "chat small"):
        span = wire.span(name)
        assert span is not None, name
        assert span.parent.span_id == server.context.span_id
    attempt = wire.span("chat small")
    assert attempt is not None
    assert attempt.kind is SpanKind.CLIENT
    assert message.headers is not None
    assert format(attempt.context.span_id, "016x") in message.headers["traceparent"]
    assert server.attributes[names.GEN_AI_FINISH_REASONS] == ("stop",)
    assert server.attributes[names.REQUEST_ID] == task.request_id
    assert server.attributes[names.ROUTE_STRATEGY] == "pinned"
    assert server.attributes[names.GEN_AI_OUTPUT_TOKENS] == len(wire.tokens("hello"))


async def test_an_error_is_recorded_by_its_reason(wire: Wire) -> None:
    await error_of(wire.stub.Generate(prompt("long " * CONTEXT)))
    await wire.until(lambda: wire.span(names.SPAN_GENERATE) is not None)
    for name in (names.SPAN_TOKENIZE, names.SPAN_GENERATE):
        span = wire.span(name)
        assert span is not None
        assert span.attributes[names.ERROR_REASON] == "PROMPT_TOO_LONG"


@pytest.mark.wire(drain_s=5.0)
async def test_draining_lets_streams_finish_and_takes_no_more(wire: Wire) -> None:
    call, task = await wire.begin(prompt())
    draining = asyncio.ensure_future(wire.gateway.drain())
    await wire.health_becomes(SERVICE, NOT_SERVING)
    code, error = await error_of(wire.stub.Generate(prompt()))
    assert (code.name, error.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")
    code, error = await error_of(wire.stub.CountTokens(pb.CountTokensRequest(prompt="hello")))
    assert (code.name, error.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")
    assert not draining.done()
    assert text_of(await wire.end(call, task, "hello")) == "hello"
    await draining


@pytest.mark.wire(drain_s=0.1)
async def test_what_does_not_finish_in_time_is_ended(wire: Wire) -> None:
    call, task = await wire.begin(prompt())
    await wire.gateway.drain()
    code, error = await error_of(call)
    assert (code.name, error.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")
    await wire.batcher.cancelled(task)


async def test_a_restart_of_nats_is_survived(tmp_path: Path, model_folder: Path) -> None:
    port = free_port()
    with nats_process(tmp_path, port) as url:
        await wait_for_nats(url, START_S)
        opened = open_wire(url, model_folder)
        wire = await opened.__aenter__()
        call, task = await wire.begin(prompt())
        await wire.batcher.send(task, frame(0, wire.tokens("hello")[:1]))
        await wire.health_becomes(SERVICE, SERVING)
    await wire.health_becomes(SERVICE, NOT_SERVING)
    code, error = await error_of(wire.stub.Generate(prompt()))
    assert (code.name, error.reason) == ("UNAVAILABLE", "TRANSPORT_UNAVAILABLE")
    async with running_nats(tmp_path, port):
        await wire.until(lambda: wire.batcher.client.is_connected)
        # What came while the link was down is lost, so the gateway asks as soon as it is back.
        await wire.batcher.asked_again(task, 1)
        await wire.batcher.send(task, last(1, wire.tokens("hello")[1:]))
        assert text_of(await events_of(call)) == "hello"
        await opened.__aexit__(None, None, None)


async def test_a_client_connects_again_and_its_stream_goes_on(opened: Opened) -> None:
    async with (
        opened(connection_age_s=1.0) as wire,
        Proxy(wire.gateway.address) as relay,
        grpc.aio.insecure_channel(relay.address) as channel,
    ):
        stub: Any = InferenceServiceStub(channel)
        call = stub.Generate(prompt())
        task = await wire.batcher.task()
        await wire.batcher.send(task, frame(0, wire.tokens("hello")))
        async with asyncio.timeout(BOUND_S):
            while relay.accepted < 2:
                await stub.ListModels(pb.ListModelsRequest())
        await wire.batcher.send(task, last(len(wire.tokens("hello"))))
        assert text_of(await events_of(call)) == "hello"
