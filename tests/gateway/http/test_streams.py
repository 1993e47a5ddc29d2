"""A stream while it has nothing to say, and what stands in its events."""

from pathlib import Path

import pytest

from gateway.http.answers import sse
from gateway.http.call import PING
from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TaskError
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.http import CHAT, Connection, chat
from tests.gateway.kit.wire import open_wire

PING_S = 0.05
PATHS = {
    CHAT: chat(stream=True),
    "/v1/completions": {"model": "small", "prompt": "hello", "stream": True},
    "/v1/responses": {"model": "small", "input": "hello", "stream": True},
}


def test_event_is_one_line_whoever_splits_it() -> None:
    text = "a\u2028b\u2029c\u0085d\u00c2e\x0bf\x1cg\u00e4"
    event = sse({"text": text})
    assert event.decode().splitlines() == [event.decode().strip(), ""]
    assert event.startswith(b'data: {"text":"a\\u2028b\\u2029c\\u0085d')
    assert "ä".encode() in event


@pytest.mark.parametrize("path", PATHS)
async def test_waiting_stream_sends_head_and_comments(
    nats_url: str, model_folder: Path, path: str
) -> None:
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", http_ping_s=PING_S) as wire:
        connection = await Connection.to(wire.http)
        await connection.send(path, PATHS[path])
        task = await wire.batcher.task()
        status, headers = await connection.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert headers["x-request-id"] == task.request_id
        assert [await connection.chunk() for _ in range(2)] == [PING, PING]
        token_ids = wire.tokens(" world")
        await wire.batcher.send(task, frame(0, token_ids))
        text = b""
        while b"world" not in text:
            text += await connection.chunk()
        assert await connection.chunk() == PING
        await wire.batcher.send(task, last(len(token_ids)))
        rest = b""
        while chunk := await connection.chunk():
            rest += chunk
        assert rest.endswith((b"data: [DONE]\n\n", b"\n\n"))
        connection.close()


async def test_error_behind_a_comment_is_an_event(nats_url: str, model_folder: Path) -> None:
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", http_ping_s=PING_S) as wire:
        connection = await Connection.to(wire.http)
        await connection.send(CHAT, chat(stream=True))
        task = await wire.batcher.task()
        assert (await connection.head())[0] == 200
        failed = TaskError(message="no memory")
        await wire.batcher.send(task, frame(0, end=TASK_END_FAILED, error=failed))
        body = b""
        while chunk := await connection.chunk():
            body += chunk
        event = body.replace(PING, b"")
        assert event.startswith(b'data: {"error":{"message":')
        assert b"[DONE]" not in event
        connection.close()
