"""Bad input and bad times over the real wire: code, reason, violations, and nothing else changes."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.admission.request_context import ItemCall
from gateway.identity.caller import Caller
from sluice.errors import ShuttingDown
from sluice.internal.v1.frame_pb2 import Frame
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.v1.safety_pb2 import CheckTextRequest
from sluice.wire import subjects
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.tokenizer import CONTEXT, write_model
from tests.gateway.kit.wire import (
    Opened,
    Wire,
    error_of,
    events_of,
    is_served,
    open_wire,
    prompt,
    text_of,
    tokens_of,
)
from tests.support.events import EventStub
from tests.support.proxy import Proxy

GENERATE = "/sluice.v1.InferenceService/Generate"
GENERATE_TEXT = "/sluice.v1.InferenceService/GenerateText"


async def still_answers(wire: Wire) -> None:
    call, task = await wire.begin(prompt())
    assert text_of(await wire.end(call, task, "hello")) == "hello"


BAD: list[tuple[pb.GenerateRequest, str, list[str]]] = [
    (prompt(""), "REQUEST_INVALID", ["prompt"]),
    (prompt("\x00\x01"), "SAFETY_BLOCKED", []),
    (prompt(model="nobody"), "MODEL_UNKNOWN", []),
    (
        prompt("", sampling=pb.SamplingParams(max_tokens=0, temperature=9)),
        "REQUEST_INVALID",
        ["prompt", "sampling.max_tokens", "sampling.temperature"],
    ),
    (prompt("long " * CONTEXT), "PROMPT_TOO_LONG", ["input"]),
    (prompt("x" * 20_000), "PROMPT_TOO_LONG", ["input"]),
    *(
        (
            prompt(sampling=pb.SamplingParams(**{field: text})),
            "REQUEST_INVALID",
            [f"sampling.{field}"],
        )
        for field, text in (
            ("json_schema", ""),
            ("json_schema", '{"not": {}}'),
            ("json_schema", '{"title": "' + "x" * (64 << 10) + '"}'),
            ("regex", "("),
            ("regex", "x" * 8193),
        )
    ),
]
CODES = {"SAFETY_BLOCKED": "FAILED_PRECONDITION", "MODEL_UNKNOWN": "NOT_FOUND"}


async def test_every_bad_request_gets_its_typed_error(wire: Wire) -> None:
    for request, reason, fields in BAD:
        got, error = await error_of(wire.stub.Generate(request))
        assert (got.name, error.reason) == (CODES.get(reason, "INVALID_ARGUMENT"), reason)
        assert [violation.field for violation in error.violations] == fields
    assert len(wire.gateway.registry) == 0
    await still_answers(wire)


@pytest.mark.parametrize(
    "payload", [b"\xb2\x01\x02\xff\xfe", b"\x07"], ids=["no UTF-8", "no message"]
)
async def test_bytes_that_are_no_request(wire: Wire, payload: bytes) -> None:
    code, error = await error_of(wire.channel.unary_stream(GENERATE)(payload))
    assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
    await still_answers(wire)


async def test_errors_of_unary_methods_are_typed_too(wire: Wire) -> None:
    code, error = await error_of(wire.stub.CountTokens(pb.CountTokensRequest(model="small")))
    assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")


async def test_a_fault_of_ours_is_internal_and_logged(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret text")

    monkeypatch.setattr("gateway.api.generate.validate", broken)
    code, error = await error_of(wire.stub.Generate(prompt()))
    assert (code.name, error.reason) == ("INTERNAL", "INTERNAL")
    assert "secret text" not in error.message
    assert "call failed: /sluice.v1.InferenceService/Generate" in caplog.text


async def test_a_model_that_nobody_serves_is_refused_at_once(wire: Wire) -> None:
    await wire.batcher.report(leaving=True)
    await wire.until(lambda: not is_served(wire.gateway, "small"))
    code, error = await error_of(wire.stub.Generate(prompt()))
    assert (code.name, error.reason) == ("UNAVAILABLE", "MODEL_UNAVAILABLE")
    assert error.retry_after_s


@pytest.mark.wire(max_concurrent_requests=1)
async def test_more_requests_than_allowed_are_refused_at_once(wire: Wire) -> None:
    first, task = await wire.begin(prompt())
    code, error = await error_of(wire.stub.Generate(prompt()))
    assert (code.name, error.reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
    assert error.retry_after_s
    for lookup in (
        wire.stub.CountTokens(pb.CountTokensRequest(prompt="hello")),
        wire.safety.CheckText(CheckTextRequest(text="hello")),
    ):
        code, error = await error_of(lookup)
        assert (code.name, error.reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
    await wire.end(first, task)
    await still_answers(wire)


BULK = {"priority": pb.PRIORITY_BULK}


async def test_bulk_calls_need_no_jetstream(wire: Wire) -> None:
    await wire.batcher.jetstream.delete_stream(subjects.DEAD_LETTERS_STREAM)
    call = wire.stub.Generate(prompt(**BULK))
    await wire.batcher.send(await wire.batcher.task(priority_class="bulk"), last(0))
    await events_of(call)


TEMPLATES = {
    "none": (None, "chat: "),
    "strict": ("{{ raise_exception('no system turn') }}", "no system turn"),
}


@pytest.mark.parametrize(("template", "words"), TEMPLATES.values(), ids=TEMPLATES)
async def test_a_conversation_that_no_template_takes(
    nats_url: str, tmp_path: Path, template: str | None, words: str
) -> None:
    folder = write_model(tmp_path / "model", template=template)
    async with open_wire(nats_url, folder) as wire:
        messages = [pb.ChatMessage(role=pb.ROLE_USER, content="hi")] * 2
        request = pb.GenerateRequest(chat=pb.ChatInput(messages=messages), model="small")
        code, error = await error_of(wire.stub.Generate(request))
        assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
        assert words in error.message


@pytest.mark.wire(reader_buffer_tokens=64)
async def test_a_slow_reader_is_ended(wire: Wire) -> None:
    """Nothing is read: flow control fills up, then the gateway's own buffer."""
    call, task = await wire.begin(prompt())
    start = 0
    while not wire.batcher.control and start < 2_000_000:
        frames = flood(wire, start, bundles=1)
        await wire.batcher.send(task, *frames)
        start += len(frames[0].token_ids)
    await wire.batcher.cancelled(task)
    await wire.until(lambda: wire.gateway.active == 0)  # before anything is read
    assert len(wire.gateway.registry) == 0
    code, error = await error_of(call)
    assert (code.name, error.reason) == ("RESOURCE_EXHAUSTED", "READER_TOO_SLOW")


async def test_unread_call_is_released_with_its_status(opened: Opened) -> None:
    limits: dict[str, Any] = {"reader_buffer_tokens": 1 << 30, "default_timeout_s": 1.0}
    async with opened(**limits) as wire:
        wire.gateway.arrivals.abort_s = 0.1
        call, task = await wire.begin(prompt())
        await wire.batcher.send(task, *flood(wire, 0, bundles=20))
        await wire.batcher.cancelled(task)
        await wire.until(lambda: wire.gateway.active == 0)
        assert len(wire.gateway.registry) == 0
        handlers = {"_handle_exceptions"}  # of grpc.aio, around ours
        await wire.until(
            lambda: not any(one.get_coro().__name__ in handlers for one in asyncio.all_tasks())
        )
        _, error = await error_of(call)
        assert error.reason == "DEADLINE_EXCEEDED"


async def test_the_first_event_is_written_whole(wire: Wire) -> None:
    """gRPC sends the headers with it, and fails to send a status before it has."""
    written = []

    async def write(event: pb.GenerateResponse) -> None:
        wire.gateway.registry.fail_all(ShuttingDown("now"))
        await asyncio.sleep(0.01)
        written.append(event)

    generator = wire.gateway.generator
    call = ItemCall(Caller("default"), {}, None)
    answering = asyncio.ensure_future(generator.answer(prompt(), call, write))
    await wire.batcher.task()
    with pytest.raises(ShuttingDown):
        await answering
    assert [event.HasField("started") for event in written] == [True]


@pytest.mark.wire(reader_buffer_tokens=1 << 30)
async def test_a_newer_call_ends_one_that_is_not_read(wire: Wire) -> None:
    request = prompt(idempotency_key="k")
    first, task = await wire.begin(request)
    frames = flood(wire, 0, bundles=20)
    await wire.batcher.send(task, *frames)
    end = sum(len(one.token_ids) for one in frames)
    own = (("grpc.use_local_subchannel_pool", 1),)  # another connection
    async with grpc.aio.insecure_channel(wire.gateway.address, own) as channel:
        second = EventStub(InferenceServiceStub(channel)).Generate(request)
        await second.read()
        await wire.until(lambda: wire.gateway.active == 1)
        await wire.batcher.send(task, last(end))
        assert len(tokens_of(await events_of(second))) == end
    assert (await error_of(first))[1].reason == "CANCELLED"


@pytest.mark.wire(max_timeout_s=1.0)
async def test_a_deadline_has_a_maximum(wire: Wire) -> None:
    call, task = await wire.begin(prompt(), timeout=600)
    assert task.timeout_ms <= 1000
    code, error = await error_of(call)
    assert (code.name, error.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")


async def test_a_caller_that_vanishes_is_noticed(opened: Opened) -> None:
    """Its host is cut off: no packet says that it has gone."""
    async with (
        opened(keepalive_s=1.0, keepalive_timeout_s=1.0) as wire,
        Proxy(wire.gateway.address) as link,
        grpc.aio.insecure_channel(link.address) as channel,
    ):
        call = InferenceServiceStub(channel).Generate(prompt())
        task = await wire.batcher.task()
        await call.read()
        link.cut()
        await wire.batcher.cancelled(task)
        await wire.until(lambda: wire.gateway.active == 0)
        call.cancel()


def flood(wire: Wire, start: int, bundles: int) -> list[Frame]:
    """Frames of thousands of tokens each."""
    token_ids = wire.tokens("hello world ") * 1000
    return [frame(start + i * len(token_ids), token_ids) for i in range(bundles)]
