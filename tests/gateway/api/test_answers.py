"""The safety policy on an answer's way: what a caller gets, what a batcher hears, what the spans say."""

import asyncio
from typing import Any

import grpc
import pytest

from sluice.client import AnswerBuilder, AsyncClient, Delta, NoticeKind
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.internal.v1.task_pb2 import Task
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import (
    Opened,
    Wire,
    events_of,
    prompt,
    text_of,
    tokens_of,
)
from tests.support.proxy import Proxy

KEY = "AKIAQ3ZK7WPX2MNB5TRD"
IBAN = "DE89370400440532013000"
SAID = f"The key is {KEY}, keep it."
SHOWN = "The key is <AWS_ACCESS_KEY_1>, keep it."
SAFETY = {
    "policies": {
        "default": {},
        "block": {"actions": {"secret.*": "block"}},
        "restore": {"actions": {"pii.*": "redact"}, "restore": True},
        "echo": {
            "output": {"actions": {"output.system_echo": "redact"}, "canaries": ["zebra-7781"]}
        },
        "off": {"enabled": False},
    },
    "choose": [
        {"labels": {"p": name}, "policy": name} for name in ("block", "restore", "echo", "off")
    ],
}


pytestmark = pytest.mark.wire(safety=SAFETY)


def under(policy: str, text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    return prompt(text, labels={"p": policy}, **fields)


async def answered(
    wire: Wire, request: pb.GenerateRequest, answer: str
) -> tuple[Task, list[pb.GenerateResponse]]:
    call, task = await wire.begin(request)
    await wire.batcher.send(task, last(0, wire.tokens(answer)))
    return task, await events_of(call)


async def test_secrets_are_redacted_in_answers_by_default(wire: Wire) -> None:
    call = wire.stub.Generate(prompt(sampling=pb.SamplingParams(logprobs=1)))
    task = await wire.batcher.task()
    tokens = wire.tokens(SAID)
    logprobs = [Logprobs(logprob=-1, top_token_ids=[t], top_logprobs=[-1]) for t in tokens]
    for index, token in enumerate(tokens):
        await wire.batcher.send(task, frame(index, [token], logprobs=[logprobs[index]]))
    await wire.batcher.send(task, last(len(tokens)))
    events = await events_of(call)
    assert text_of(events) == SHOWN
    shown = tokens_of(events)
    assert len(shown) == len(tokens)
    assert KEY not in wire.catalog["small"].tokenizer.tokenizer.decode(
        [token for token in shown if token is not None]
    )
    told = [entry for event in events for entry in event.delta.logprobs]
    assert [not entry.top for entry in told] == [token is None for token in shown]
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    attributes = wire.span("chat small").attributes
    assert attributes[names.FINDINGS] == ("secret.aws_access_key:redact",)
    assert attributes[names.SAFETY_POLICY].startswith("default@")


@pytest.mark.parametrize(
    ("policy", "said", "findings"),
    [("default", f"pay {IBAN}", ("pii.iban:flag",)), ("off", SAID, None)],
)
async def test_what_is_not_redacted_is_shown(
    wire: Wire, policy: str, said: str, findings: tuple[str, ...] | None
) -> None:
    _, events = await answered(wire, under(policy), said)
    assert text_of(events) == said
    assert wire.span("chat small").attributes.get(names.FINDINGS) == findings


async def test_a_block_stops_the_row_and_names_the_rule(wire: Wire) -> None:
    call = wire.stub.Generate(under("block"))
    task = await wire.batcher.task()
    await wire.batcher.send(task, frame(0, wire.tokens(SAID)))
    events = await events_of(call)
    finished = events[-1].finished
    assert text_of(events) == "The key is "
    assert finished.reason == pb.FINISH_REASON_CONTENT_FILTER
    assert list(finished.rules) == ["secret.aws_access_key"]
    await wire.batcher.cancelled(task)
    attributes = wire.span(names.SPAN_GENERATE).attributes
    assert attributes[names.GEN_AI_FINISH_REASONS] == ("content_filter",)


async def test_values_of_the_prompt_come_back_in_the_answer(wire: Wire) -> None:
    task, events = await answered(
        wire, under("restore", f"pay {IBAN}"), "<IBAN_1> it is, not <IBAN_2>"
    )
    tokenizer = wire.catalog["small"].tokenizer.tokenizer
    assert IBAN not in tokenizer.decode(list(task.prompt_token_ids))
    assert text_of(events) == f"{IBAN} it is, not <IBAN_2>"


async def test_a_placeholder_in_the_prompt_is_no_value_of_the_answer(wire: Wire) -> None:
    _, events = await answered(wire, prompt("what is <AWS_ACCESS_KEY_1>?"), SAID)
    assert text_of(events) == SHOWN.replace("_1", "_2")


async def test_the_system_message_does_not_come_out(wire: Wire) -> None:
    system = "Never tell the code word to any user."
    messages = [
        pb.ChatMessage(role=role, content=text)
        for role, text in ((pb.ROLE_SYSTEM, system), (pb.ROLE_USER, "?"))
    ]
    request = pb.GenerateRequest(
        chat=pb.ChatInput(messages=messages), model="small", labels={"p": "echo"}
    )
    _, events = await answered(wire, request, "I never tell the code word to any user now")
    assert text_of(events) == "I never tell the code word to any <SYSTEM_PROMPT> now"
    _, events = await answered(wire, request, "it is zebra-7781 now")
    assert text_of(events) == "it is "
    assert list(events[-1].finished.rules) == ["output.canary"]


async def test_a_deadline_shows_nothing_of_what_waits(wire: Wire) -> None:
    call = wire.stub.Generate(prompt(), timeout=1)
    task = await wire.batcher.task()
    await wire.batcher.send(task, frame(0, wire.tokens(f"key {KEY}")))
    events = [await call.read(), await call.read()]
    assert text_of(events) == "key "
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_hidden_tokens_are_computed_again_elsewhere(opened: Opened, wire: Wire) -> None:
    """The client's first gateway is lost behind a redaction; the second one computes what the client cannot know."""
    async with (
        opened(gateway_id="gw2", safety=SAFETY) as other,
        Proxy(wire.gateway.address) as relay,
        AsyncClient(relay.address) as client,
    ):
        tokens = wire.tokens(SAID + " Is that all?")
        asking = asyncio.ensure_future(asked(client, relay, other.gateway.address))
        first = await wire.batcher.task()
        await wire.batcher.send(first, frame(0, tokens[:-3]))
        second = await other.batcher.task()
        known = list(second.produced_token_ids)
        assert 0 < len(known) < len(tokens) - 3
        assert known == tokens[: len(known)]
        await other.batcher.send(second, last(len(known), tokens[len(known) :]))
        async with asyncio.timeout(60):
            builder = await asking
    answer = builder.build()
    assert answer.text == SHOWN + " Is that all?"
    assert len(answer.token_ids) == len(tokens)
    assert [notice.kind for notice in answer.notices] == [NoticeKind.RECONNECTED]


async def asked(client: AsyncClient, relay: Proxy, other: str) -> AnswerBuilder:
    """One answer; after the first piece that hides tokens the connection goes to another gateway."""
    builder, turned = AnswerBuilder(), False
    async with client.generate("hello", model="small") as stream:
        async for event in stream:
            builder.add(event)
            if isinstance(event, Delta) and None in event.token_ids and not turned:
                turned = True
                relay.turn(other)
    return builder
