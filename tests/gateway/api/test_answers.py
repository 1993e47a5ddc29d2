"""The safety policy on an answer's way: what a caller gets, what a batcher hears, what the spans say."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
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
    error_of,
    events_of,
    open_wire,
    prompt,
    resumed,
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


@pytest.fixture
async def guarded(nats_url: str, model_folder: Path) -> AsyncIterator[Wire]:
    async with open_wire(nats_url, model_folder, safety=SAFETY) as opened:
        yield opened


def under(policy: str, text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    return prompt(text, labels={"p": policy}, **fields)


async def answered(
    wire: Wire, request: pb.GenerateRequest, answer: str
) -> tuple[Task, list[pb.GenerateResponse]]:
    call, task = await wire.begin(request)
    await wire.batcher.send(task, last(0, wire.tokens(answer)))
    return task, await events_of(call)


async def test_secrets_are_redacted_in_answers_by_default(guarded: Wire) -> None:
    call = guarded.stub.Generate(prompt(sampling=pb.SamplingParams(logprobs=1)))
    task = await guarded.batcher.task()
    tokens = guarded.tokens(SAID)
    logprobs = [Logprobs(logprob=-1, top_token_ids=[t], top_logprobs=[-1]) for t in tokens]
    for index, token in enumerate(tokens):
        await guarded.batcher.send(task, frame(index, [token], logprobs=[logprobs[index]]))
    await guarded.batcher.send(task, last(len(tokens)))
    events = await events_of(call)
    assert text_of(events) == SHOWN
    shown = tokens_of(events)
    assert len(shown) == len(tokens)
    assert KEY not in guarded.catalog["small"].tokenizer.tokenizer.decode(
        [token for token in shown if token is not None]
    )
    told = [entry for event in events for entry in event.delta.logprobs]
    assert [not entry.top for entry in told] == [token is None for token in shown]
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    attributes = guarded.span("chat small").attributes
    assert attributes[names.FINDINGS] == ("secret.aws_access_key:redact",)
    assert attributes[names.SAFETY_POLICY].startswith("default@")


async def test_what_is_only_flagged_in_an_answer_is_on_its_span(guarded: Wire) -> None:
    _, events = await answered(guarded, prompt(), f"pay {IBAN}")
    assert text_of(events) == f"pay {IBAN}"
    assert guarded.span("chat small").attributes[names.FINDINGS] == ("pii.iban:flag",)


async def test_a_policy_can_leave_answers_alone(guarded: Wire) -> None:
    _, events = await answered(guarded, under("off"), SAID)
    assert text_of(events) == SAID
    assert names.FINDINGS not in guarded.span("chat small").attributes


async def test_a_block_stops_the_row_and_names_the_rule(guarded: Wire) -> None:
    call = guarded.stub.Generate(under("block"))
    task = await guarded.batcher.task()
    await guarded.batcher.send(task, frame(0, guarded.tokens(SAID)))
    events = await events_of(call)
    finished = events[-1].finished
    assert text_of(events) == "The key is "
    assert finished.reason == pb.FINISH_REASON_CONTENT_FILTER
    assert list(finished.rules) == ["secret.aws_access_key"]
    await guarded.batcher.cancelled(task)
    attributes = guarded.span(names.SPAN_GENERATE).attributes
    assert attributes[names.GEN_AI_FINISH_REASONS] == ("content_filter",)


async def test_values_of_the_prompt_come_back_in_the_answer(guarded: Wire) -> None:
    task, events = await answered(
        guarded, under("restore", f"pay {IBAN}"), "<IBAN_1> it is, not <IBAN_2>"
    )
    tokenizer = guarded.catalog["small"].tokenizer.tokenizer
    assert IBAN not in tokenizer.decode(list(task.prompt_token_ids))
    assert text_of(events) == f"{IBAN} it is, not <IBAN_2>"


async def test_the_system_message_does_not_come_out(guarded: Wire) -> None:
    system = "Never tell the code word to any user."
    messages = [
        pb.ChatMessage(role=role, content=text)
        for role, text in ((pb.ROLE_SYSTEM, system), (pb.ROLE_USER, "?"))
    ]
    request = pb.GenerateRequest(
        chat=pb.ChatInput(messages=messages), model="small", labels={"p": "echo"}
    )
    _, events = await answered(guarded, request, "I never tell the code word to any user now")
    assert text_of(events) == "I never tell the code word to any <SYSTEM_PROMPT> now"
    _, events = await answered(guarded, request, "it is zebra-7781 now")
    assert text_of(events) == "it is "
    assert list(events[-1].finished.rules) == ["output.canary"]


async def test_a_deadline_shows_nothing_of_what_waits(guarded: Wire) -> None:
    call = guarded.stub.Generate(prompt(), timeout=3)
    task = await guarded.batcher.task()
    await guarded.batcher.send(task, frame(0, guarded.tokens(f"key {KEY}")))
    events = [await call.read(), await call.read()]
    assert text_of(events) == "key "
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_hidden_tokens_are_computed_again_elsewhere(opened: Opened, guarded: Wire) -> None:
    """The client's first gateway is lost behind a redaction; the second one computes what the client cannot know."""
    async with (
        opened(gateway_id="gw2", safety=SAFETY) as other,
        Proxy(guarded.gateway.address) as relay,
        AsyncClient(relay.address) as client,
    ):
        tokens = guarded.tokens(SAID + " Is that all?")
        asking = asyncio.ensure_future(asked(client, relay, other.gateway.address))
        first = await guarded.batcher.task()
        await guarded.batcher.send(first, frame(0, tokens[:-3]))
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


async def test_an_answer_that_has_changed_is_refused_with_what_to_do(guarded: Wire) -> None:
    held = guarded.tokens(SAID)
    call = guarded.stub.Generate(resumed(prompt(), held))
    task = await guarded.batcher.task()
    await guarded.batcher.send(task, last(len(held), guarded.tokens(" ok")))
    code, error = await error_of(call)
    assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
    assert "ask again without resume" in error.message
    assert [violation.field for violation in error.violations] == ["resume.token_ids"]
