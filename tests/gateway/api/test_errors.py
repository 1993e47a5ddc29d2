"""Bad input and bad times over the real wire: code, reason, violations, and nothing else changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.admission.request_context import ItemCall
from gateway.identity.caller import Caller
from sluice.errors import ShuttingDown, SluiceError
from sluice.internal.v1.frame_pb2 import TASK_END_RETURNED, Frame, TaskError
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

GENERATE = "/sluice.v1.InferenceService/Generate"
GENERATE_TEXT = "/sluice.v1.InferenceService/GenerateText"


async def still_answers(wire: Wire) -> None:
    call, task = await wire.begin(prompt())
    assert text_of(await wire.end(call, task, "hello")) == "hello"


async def send_bytes(
    wire: Wire, payload: bytes, method: str = GENERATE
) -> tuple[grpc.StatusCode, SluiceError]:
    send: Any = wire.channel.unary_stream(method)
    return await error_of(send(payload))


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


async def test_bytes_that_are_not_utf_8(wire: Wire) -> None:
    code, error = await send_bytes(wire, b"\xb2\x01\x02\xff\xfe")
    assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
    assert "UTF-8" in error.message
    await still_answers(wire)


async def test_bytes_that_are_no_message(wire: Wire) -> None:
    code, error = await send_bytes(wire, b"\x07")
    assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")


@pytest.mark.wire(max_message_bytes=4096)
async def test_a_message_over_the_limit_says_both_numbers(wire: Wire) -> None:
    request = prompt("x" * 5000)
    code, error = await error_of(wire.stub.Generate(request))
    assert (code.name, error.reason) == ("INVALID_ARGUMENT", "MESSAGE_TOO_LARGE")
    assert error.metadata == {"bytes": str(request.ByteSize()), "limit_bytes": "4096"}
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


@pytest.mark.wire(max_concurrent_requests=4)
async def test_waiting_bulk_calls_take_nothing_from_interactive_ones(wire: Wire) -> None:
    bulk = [wire.stub.Generate(prompt(priority=pb.PRIORITY_BULK)) for _ in range(8)]
    # Of two places for bulk one is left to other tenants.
    await wire.until(lambda: sum(call.done() for call in bulk) == 7)
    await wire.batcher.task(priority_class="bulk")
    await still_answers(wire)
    for call in bulk:
        call.cancel()


BULK = {"priority": pb.PRIORITY_BULK}


async def test_a_call_waits_until_a_batcher_has_room(wire: Wire) -> None:
    call, task = await wire.begin(prompt())
    full = TaskError(reason="OVERLOADED", message="no room")
    await wire.batcher.send(task, frame(0, end=TASK_END_RETURNED, error=full))
    again = await wire.batcher.task()
    assert again.attempt > task.attempt
    await wire.end(call, again)


async def test_bulk_calls_need_no_jetstream(wire: Wire) -> None:
    await wire.batcher.jetstream.delete_stream(subjects.DEAD_LETTERS_STREAM)
    call = wire.stub.Generate(prompt(**BULK))
    await wire.batcher.send(await wire.batcher.task(priority_class="bulk"), last(0))
    await events_of(call)


async def test_a_conversation_needs_a_template(nats_url: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", template=None)
    async with open_wire(nats_url, folder) as wire:
        messages = [pb.ChatMessage(role=pb.ROLE_USER, content="hi")] * 2
        request = pb.GenerateRequest(chat=pb.ChatInput(messages=messages), model="small")
        _, error = await error_of(wire.stub.Generate(request))
        assert [violation.field for violation in error.violations] == ["chat"]
        await still_answers(wire)


async def test_what_a_template_refuses_is_the_callers_to_mend(
    nats_url: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "strict", template="{{ raise_exception('no system turn') }}")
    async with open_wire(nats_url, folder) as wire:
        code, error = await error_of(wire.stub.Generate(prompt()))
        assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
        assert "no system turn" in error.message


async def test_the_deadline_ends_a_call_that_nobody_reads(opened: Opened) -> None:
    """The gateway waits inside a write when the deadline comes."""
    limits: dict[str, Any] = {"reader_buffer_tokens": 1 << 30, "default_timeout_s": 1.0}
    async with opened(**limits) as wire:
        call, task = await wire.begin(prompt())
        await wire.batcher.send(task, *flood(wire, 0, bundles=20))
        await wire.batcher.cancelled(task)
        assert len(wire.gateway.registry) == 0
        code, error = await error_of(call)
        assert (code.name, error.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
        await wire.until(lambda: wire.gateway.active == 0)


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
        await wire.until(lambda: wire.gateway.active == 0)
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
        cut_off_later(wire) as (address, cut),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = InferenceServiceStub(channel).Generate(prompt())
        task = await wire.batcher.task()
        await call.read()
        cut.set()
        await wire.batcher.cancelled(task)
        await wire.until(lambda: wire.gateway.active == 0)
        call.cancel()


@asynccontextmanager
async def cut_off_later(wire: Wire) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address through which the gateway is reached until the event is set; connections stay open then."""
    cut, host, port = asyncio.Event(), *wire.gateway.address.split(":")
    links: list[asyncio.Task[None]] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                if not cut.is_set():
                    writer.write(data)
            await asyncio.Event().wait()
        finally:
            writer.close()

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port))
        links.append(asyncio.ensure_future(forward(reader, ours)))
        links.append(asyncio.ensure_future(forward(theirs, writer)))

    server = await asyncio.start_server(link, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        server.close()
        for one in links:
            one.cancel()
        await asyncio.wait(links)


def flood(wire: Wire, start: int, bundles: int) -> list[Frame]:
    """Frames of thousands of tokens each."""
    token_ids = wire.tokens("hello world ") * 1000
    return [frame(start + i * len(token_ids), token_ids) for i in range(bundles)]
