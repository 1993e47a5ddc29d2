"""Answers over HTTP, as OpenAI's own client reads them."""

import asyncio
import time
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI

from gateway.http.call import PING
from sluice.internal.v1.frame_pb2 import (
    TASK_END_FAILED,
    TASK_END_LENGTH,
    Logprobs,
    TaskError,
)
from sluice.internal.v1.task_pb2 import Task
from tests.gateway.kit.batcher import BOUND_S, frame, last
from tests.gateway.kit.http import CHAT, Connection, ask, chat, events_in
from tests.gateway.kit.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER
from tests.gateway.kit.wire import Wire, open_wire

HELLO: Any = [{"role": "user", "content": "hello"}]


async def answered(wire: Wire, asking: Any, text: str = " world, how are you?") -> tuple[Any, Task]:
    """What ``asking`` gets when the batcher sends ``text``, and had two tokens of the prompt."""
    future = asyncio.ensure_future(asking)
    task = await wire.batcher.task()
    tokens = wire.tokens(text)
    await wire.batcher.send(task, frame(0, tokens[:1]))
    end = last(1, tokens[1:])
    end.final.cached_prompt_tokens = 2
    await wire.batcher.send(task, end)
    return await future, task


async def test_a_chat_is_answered_whole(http: Wire, openai: AsyncOpenAI) -> None:
    begun = int(time.time())
    turns: Any = [{"role": "system", "content": "be brief"}, *HELLO]
    asking = openai.chat.completions.with_raw_response.create(model="small", messages=turns)
    raw, task = await answered(http, asking)
    answer = raw.parse()
    assert answer.choices[0].message.content == " world, how are you?"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.model, answer.object) == ("small", "chat.completion")
    assert begun <= answer.created <= time.time()
    assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"
    assert raw.headers["x-request-id"] == task.request_id
    assert answer.usage is not None
    completion = len(http.tokens(" world, how are you?"))
    assert answer.usage.completion_tokens == completion
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.total_tokens == len(task.prompt_token_ids) + completion
    text = f"{BOS}{SYSTEM}be brief{END}{USER}hello{END}{ASSISTANT}"
    assert list(task.prompt_token_ids) == http.tokens(text)


async def test_a_chat_is_streamed(http: Wire, openai: AsyncOpenAI) -> None:
    async def stream() -> list[Any]:
        chunks = await openai.chat.completions.create(
            model="small", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in chunks]

    chunks, task = await answered(http, stream())
    *parts, usage = chunks
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{task.request_id}"}
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
    assert text == " world, how are you?"
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + [
        "stop"
    ]
    assert usage.choices == []
    assert usage.usage.prompt_tokens == len(task.prompt_token_ids)
    assert usage.usage.prompt_tokens_details.cached_tokens == 2
    assert all(chunk.usage is None for chunk in parts)


async def test_the_task_has_what_the_body_and_the_headers_say(
    http: Wire, openai: AsyncOpenAI
) -> None:
    asking = openai.chat.completions.create(
        model="large",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.75,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=7,
        stop=["xyz"],
        logprobs=True,
        top_logprobs=2,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}},
        },
        user="me",
        extra_body={"top_k": 3},
        extra_headers={
            "x-sluice-priority": "standard",
            "x-sluice-timeout": "60",
            "sluice-tenant": "acme",
            "x-sluice-label-task": "sum",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        },
    )
    future = asyncio.ensure_future(asking)
    message = await http.batcher.message("large", "standard")
    task = Task.FromString(message.data)
    sampling = task.sampling
    assert (task.tenant, task.workload) == ("acme", "sum")
    assert 50_000 < task.timeout_ms <= 60_000
    assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (9, 7, 3)
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.75)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 2)
    assert sampling.json_schema == '{"type": "object"}'
    assert message.headers is not None
    assert message.headers["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    await http.batcher.send(task, last(0, http.tokens("{}")))
    await future


async def test_a_completion_is_a_raw_prompt(http: Wire, openai: AsyncOpenAI) -> None:
    asking = asyncio.ensure_future(
        openai.completions.create(model="small", prompt="hello", max_tokens=4, logprobs=1)
    )
    task = await http.batcher.task()
    assert list(task.prompt_token_ids) == http.tokens("hello")
    tokens = http.tokens("h z")
    scores = [Logprobs(logprob=-1.0, top_token_ids=[one], top_logprobs=[-1.0]) for one in tokens]
    await http.batcher.send(task, frame(0, tokens, logprobs=scores, end=TASK_END_LENGTH))
    answer = await asking
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "h z"
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "h z"
    assert (logprobs.text_offset or [])[0] == 0
    assert logprobs.token_logprobs == [-1.0] * len(tokens)


async def test_a_completion_is_streamed(http: Wire) -> None:
    body = {"model": "small", "prompt": "hello", "stream": True}
    reply, task = await answered(http, ask(http.http, "/v1/completions", body))
    *chunks, end = events_in(reply.body)
    assert end == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " world, how are you?"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in chunks[0]
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-request-id"] == task.request_id


async def test_an_error_before_the_first_text_has_its_status(http: Wire) -> None:
    asking = asyncio.ensure_future(ask(http.http, body=chat(stream=True)))
    task = await http.batcher.task()
    failed = TaskError(message="no memory")
    await http.batcher.send(task, frame(0, end=TASK_END_FAILED, error=failed))
    reply = await asking
    assert reply.status == 500
    assert (reply.error["code"], reply.error["type"]) == ("engine_failed", "server_error")
    assert reply.headers["x-request-id"] == task.request_id
    assert reply.headers["x-should-retry"] == "false"


async def test_an_error_in_a_stream_is_its_last_event(http: Wire, openai: AsyncOpenAI) -> None:
    stream = asyncio.ensure_future(
        openai.chat.completions.create(model="small", messages=HELLO, stream=True)
    )
    task = await http.batcher.task()
    await http.batcher.send(task, frame(0, http.tokens("hello")))
    chunks = await stream
    failed = frame(
        len(http.tokens("hello")), end=TASK_END_FAILED, error=TaskError(message="no memory")
    )
    await http.batcher.send(task, failed)
    with pytest.raises(sdk.APIError) as caught:
        [chunk async for chunk in chunks]
    assert caught.value.code == "engine_failed"


@pytest.mark.parametrize(("streams", "answers"), [(False, 1), (True, 1), (True, 2)])
async def test_client_that_leaves_cancels_its_runs(http: Wire, streams: bool, answers: int) -> None:
    connection = await Connection.to(http.http)
    await connection.send(CHAT, chat(stream=streams, n=answers))
    tasks = [await http.batcher.task() for _ in range(answers)]
    await http.batcher.send(tasks[0], frame(0, http.tokens("hello")))
    if streams:
        await connection.head()
    connection.close()
    for task in tasks:
        await http.batcher.cancelled(task)
    await http.until(lambda: http.gateway.active == 0)


async def test_a_half_closed_client_gets_its_stream(http: Wire) -> None:
    """In a pause of the stream it gets a comment, by which one that has closed is known."""
    connection = await Connection.to(http.http)
    await connection.send(CHAT, chat(stream=True))
    connection.writer.write_eof()
    task = await http.batcher.task()
    tokens = http.tokens("hello")
    await http.batcher.send(task, frame(0, tokens))
    async with asyncio.timeout(BOUND_S):
        await connection.reader.readuntil(PING)
    await http.batcher.send(task, last(len(tokens), tokens))
    assert b"[DONE]" in await connection.reader.read()
    connection.close()


@pytest.mark.parametrize(
    ("limit", "code"),
    [({"reader_buffer_tokens": 64}, "reader_too_slow"), ({"default_timeout_s": 1.0}, "deadline")],
)
async def test_a_client_that_does_not_read_is_ended(
    nats_url: str,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: dict[str, Any],
    code: str,
) -> None:
    """The buffers of the sockets fill up, then the gateway's own."""
    monkeypatch.setattr("gateway.http.call.FAIL_S", 0.1)
    limits = {"reader_buffer_tokens": 1 << 30, **limit}
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", **limits) as wire:
        connection = await Connection.to(wire.http, limit=1024)
        await connection.send(CHAT, chat(stream=True))
        task = await wire.batcher.task()
        start, text = 0, wire.tokens("hello") * 200
        while not wire.batcher.control and start < 10_000_000:
            await wire.batcher.send(task, frame(start, text))
            start += len(text)
        await wire.batcher.cancelled(task)
        await wire.until(lambda: wire.gateway.active == 0)
        connection.close()
