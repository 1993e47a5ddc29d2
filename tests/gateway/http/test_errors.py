"""Every error leaves as OpenAI's JSON with an id of the request, and what is a fault of ours stands in the log."""

import asyncio

import pytest
from typing_extensions import override

from gateway.http.api import ErrorAnswer, Names, OpenAi
from gateway.http.call import HttpCall
from sluice.errors import InvalidRequest, SluiceError
from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TASK_END_REFUSED, TaskError
from tests.gateway.kit.batcher import frame
from tests.gateway.kit.http import CHAT, Connection, ask, chat, health_of
from tests.gateway.kit.wire import Wire


async def test_a_prompt_that_a_worker_finds_too_long(http: Wire) -> None:
    asking = asyncio.ensure_future(ask(http.http, body=chat()))
    task = await http.batcher.task()
    error = TaskError(
        reason="PROMPT_TOO_LONG", message="the prompt has 9 tokens, the engine reads 8"
    )
    await http.batcher.send(task, frame(0, end=TASK_END_REFUSED, error=error))
    reply = await asking
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == "messages"
    assert "this model's maximum context length is exceeded: messages: " in reply.error["message"]
    assert reply.headers["x-request-id"] == task.request_id


async def test_a_fault_in_a_route_is_json(http: Wire, caplog: pytest.LogCaptureFixture) -> None:
    http.gateway.streams = None  # type: ignore[assignment]
    reply = await health_of(http.http)
    assert (reply.status, reply.error["code"]) == (500, "internal")
    assert "NoneType" not in reply.error["message"]
    assert f"HTTP call {reply.headers['x-request-id']} failed: GET /health" in caplog.text


async def test_a_fault_in_the_error_path_is_json(
    http: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(OpenAi):
        @override
        def error(self, error: SluiceError, named: Names, request_id: str) -> ErrorAnswer:
            if isinstance(error, InvalidRequest):
                raise KeyError("context_tokens")
            return super().error(error, named, request_id)

    monkeypatch.setattr("gateway.http.call.api_of", lambda path, headers: Faulty())
    reply = await ask(http.http, body=chat(temperature=3))
    assert (reply.status, reply.error["code"]) == (500, "internal")
    assert f"to a caller failed: {reply.headers['x-request-id']}" in caplog.text


@pytest.mark.parametrize("streams", [False, True])
async def test_a_fault_that_nothing_else_catches(
    http: Wire, streams: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that has begun is cut: its client must not take it for complete."""

    async def fail(call: HttpCall, error: SluiceError) -> None:
        raise KeyError("a word of ours")

    monkeypatch.setattr(HttpCall, "fail", fail)
    connection = await Connection.to(http.http)
    await connection.send(CHAT, chat(stream=streams))
    task = await http.batcher.task()
    if streams:
        await http.batcher.send(task, frame(0, http.tokens("hello")))
        await connection.head()
    failed = frame(len(http.tokens("hello")) if streams else 0, end=TASK_END_FAILED)
    await http.batcher.send(task, failed)
    if streams:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await connection.reply()
    else:
        reply = await connection.reply()
        assert (reply.status, reply.error["code"]) == (500, "internal")
        assert f"HTTP call {reply.headers['x-request-id']} failed: POST {CHAT}" in caplog.text
    connection.close()
