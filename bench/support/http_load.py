"""Callers of OpenAI's API that cost little: plain sockets with keep-alive, and hardly any parsing."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

CALL_S: Final = 300.0
DONE: Final = b"data: [DONE]\n\n"
END: Final = b"0\r\n\r\n"
"""Of a chunked body."""


ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024


async def stream_chats(address: str, model: str, prompts: Sequence[str], callers: int) -> float:
    """A streamed answer of one token to each of ``prompts``; callers have a connection each. Seconds."""
    bodies = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 1} for text in prompts
    ]
    requests = [_request(address, "/v1/chat/completions", model, body) for body in bodies]
    return await _stream(address, requests, callers, DONE)


async def stream_completions(
    address: str, model: str, prompts: Sequence[str], tokens: int, callers: int
) -> float:
    """A streamed greedy answer of so many tokens to each of ``prompts``, as `stream_chats`. Seconds."""
    bodies = [
        {
            "prompt": text,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        for text in prompts
    ]
    requests = [_request(address, "/v1/completions", model, body) for body in bodies]
    return await _stream(address, requests, callers, b'"completion_tokens":%d' % tokens)


async def _stream(address: str, requests: Sequence[bytes], callers: int, expected: bytes) -> float:
    """All requests, each answered with ``expected`` somewhere in it. Seconds."""
    left, begun = iter(requests), time.perf_counter()

    async def caller() -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=ANSWER_BYTES_MAX)
        try:
            for request in left:
                writer.write(request)
                async with asyncio.timeout(CALL_S):
                    answer = await reader.readuntil(END)
                assert expected in answer.replace(b'": ', b'":'), answer[-2000:]
        finally:
            writer.close()
            await writer.wait_closed()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return time.perf_counter() - begun


def _request(address: str, path: str, model: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps({"model": model, **body, "stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {address}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
