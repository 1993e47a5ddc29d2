"""Keys that callers named, at two real gateways before a real nats-server; the test plays the batcher."""

from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest

from sluice.internal.v1.gateway_pb2 import KeyRecord
from sluice.v1 import inference_pb2 as pb
from sluice.wire import subjects
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import (
    Wire,
    error_of,
    events_of,
    open_wire,
    prompt,
    resumed,
    text_of,
    tokens_of,
)
from tests.support.events import kind_of


def keyed(
    text: str = "hello", held: list[int] | None = None, **fields: object
) -> pb.GenerateRequest:
    request = prompt(text, idempotency_key="k1", **fields)
    return resumed(request, held) if held else request


@pytest.fixture
async def wires(nats_url: str, model_folder: Path) -> AsyncIterator[tuple[Wire, Wire]]:
    async with (
        open_wire(nats_url, model_folder, gateway_id="gw1") as one,
        open_wire(nats_url, model_folder, gateway_id="gw2") as two,
    ):
        await one.until(lambda: one.gateway.shared.peers.alive == ["gw2"])
        yield one, two


async def records_of(url: str) -> list[KeyRecord]:
    """What is in the bucket."""
    client = await nats.connect(url)
    try:
        jetstream = client.jetstream()
        info = await jetstream.stream_info(subjects.KEYS_BUCKET)
        if not info.state.messages:
            return []
        found = await jetstream.get_last_msg(
            subjects.KEYS_BUCKET, f"{subjects.bucket_prefix(subjects.KEYS_BUCKET)}>"
        )
        return [KeyRecord.FromString(found.data or b"")]
    finally:
        await client.close()


async def test_the_other_gateway_takes_a_running_call_over(wires: tuple[Wire, Wire]) -> None:
    one, two = wires
    first = one.stub.Generate(keyed())
    task = await one.batcher.task()
    answer = one.tokens("hello world, how are you?")
    await one.batcher.send(task, frame(0, answer[:3]))
    while kind_of(event := await first.read()) != "delta":
        seed = event.started.seed
    second = two.stub.Generate(keyed(held=answer[:2]))
    code, error = await error_of(first)
    assert (code.name, error.reason) == ("CANCELLED", "CANCELLED")
    await one.batcher.cancelled(task)
    again = await two.batcher.task()
    assert (again.gateway, list(again.produced_token_ids)) == ("gw2", answer[:2])
    assert again.sampling.seed == seed
    await two.batcher.send(again, last(2, answer[2:]))
    assert tokens_of(await events_of(second)) == answer[2:]
    assert len(one.gateway.registry) == len(two.gateway.registry) == 0


async def test_the_other_gateway_replays_a_complete_answer(
    wires: tuple[Wire, Wire], nats_url: str
) -> None:
    one, two = wires
    first = one.stub.Generate(keyed())
    task = await one.batcher.task()
    answer = one.tokens("hello world")
    await one.batcher.send(task, last(0, answer))
    once = await events_of(first)
    (record,) = await records_of(nats_url)
    assert (record.gateway, record.HasField("answer")) == ("gw1", True)
    again = await events_of(two.stub.Generate(keyed()))
    assert text_of(again) == text_of(once)
    assert again[0].started == once[0].started
    assert again[1].notices[0].kind == pb.NOTICE_KIND_REPLAYED
    assert again[-1].finished == once[-1].finished
    rest = await events_of(two.stub.Generate(keyed(held=answer[:1])))
    assert tokens_of(rest) == answer[1:]
    _, error = await error_of(two.stub.Generate(keyed(held=[answer[0] + 1])))
    assert error.reason == "REQUEST_INVALID"


async def test_another_request_with_the_key_is_refused_everywhere(
    wires: tuple[Wire, Wire],
) -> None:
    one, two = wires
    first = one.stub.Generate(keyed())
    await one.batcher.task()
    code, error = await error_of(two.stub.Generate(keyed("something else")))
    assert (code.name, error.reason) == ("ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED")
    assert len(one.gateway.registry) == 1
    first.cancel()


async def test_a_gateway_that_is_gone_is_not_waited_for(wires: tuple[Wire, Wire]) -> None:
    one, two = wires
    first = one.stub.Generate(keyed())
    task = await one.batcher.task()
    answer = two.tokens("hello world, how are you?")
    await two.batcher.send(task, frame(0, answer[:3]))
    while kind_of(await first.read()) != "delta":
        pass
    # As when the process is killed: its connection to NATS is gone, its record stays.
    assert one.gateway.shared.peers.client is not None
    await one.gateway.shared.peers.client.close()
    second = two.stub.Generate(keyed(held=answer[:2]))
    again = await two.batcher.task()
    assert list(again.produced_token_ids) == answer[:2]
    await two.batcher.send(again, last(2, answer[2:]))
    assert tokens_of(await events_of(second)) == answer[2:]
    first.cancel()


async def test_a_key_of_the_client_alone_costs_no_message(
    wires: tuple[Wire, Wire], nats_url: str
) -> None:
    one, _ = wires
    for request in (prompt(), keyed(idempotency_key_generated=True)):
        call = one.stub.Generate(request)
        task = await one.batcher.task()
        await one.batcher.send(task, last(0, one.tokens("hello")))
        await events_of(call)
    client = await nats.connect(nats_url)
    info = await client.jetstream().stream_info(subjects.KEYS_BUCKET)
    await client.close()
    assert info.state.last_seq == 0


async def test_without_jetstream_only_named_keys_are_refused(
    wires: tuple[Wire, Wire], nats_url: str
) -> None:
    one, _ = wires
    client = await nats.connect(nats_url)
    await client.jetstream().delete_stream(subjects.KEYS_BUCKET)
    await client.close()
    code, error = await error_of(one.stub.Generate(keyed()))
    assert (code.name, error.reason) == ("UNAVAILABLE", "TRANSPORT_UNAVAILABLE")
    assert error.retry_after_s is not None
    call = one.stub.Generate(prompt())
    task = await one.batcher.task()
    await one.batcher.send(task, last(0, one.tokens("hello")))
    assert text_of(await events_of(call)) == "hello"
