"""A client of HTTP that can do what proper ones do not."""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sluice.internal.v1.frame_pb2 import TaskEnd as Ends
from sluice.internal.v1.task_pb2 import Task
from tests.gateway.kit.batcher import BOUND_S, frame, last
from tests.gateway.kit.wire import Wire

T = TypeVar("T")
TaskEnd = Ends.ValueType

CHAT = "/v1/chat/completions"


@dataclass
class Reply:
    """What the server sent."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


class Connection:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, address: str, limit: int = 1 << 20) -> "Connection":
        """``limit``: bytes that it reads ahead."""
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=limit))

    async def send(
        self, path: str, body: object = None, method: str = "POST", **headers: str
    ) -> None:
        """Sends a request; a ``body`` that is not bytes as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {
            "host": "localhost",
            "content-type": "application/json",
            "content-length": str(len(data)),
        }
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in head.items() if v)]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await self.writer.drain()

    async def reply(self) -> Reply:
        """The next whole reply."""
        async with asyncio.timeout(BOUND_S):
            status, headers = await self.head()
            if "content-length" in headers:
                return Reply(
                    status, headers, await self.reader.readexactly(int(headers["content-length"]))
                )
            body = b""
            while chunk := await self.chunk():
                body += chunk
            return Reply(status, headers, body)

    async def head(self) -> tuple[int, Mapping[str, str]]:
        async with asyncio.timeout(BOUND_S):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines if line)

    async def chunk(self) -> bytes:
        async with asyncio.timeout(BOUND_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    def close(self) -> None:
        self.writer.transport.abort()


async def health_of(address: str) -> Reply:
    """Return the reply of /health once the gateway serves."""
    async with asyncio.timeout(BOUND_S):
        while (reply := await ask(address, "/health", method="GET")).status == 503:
            pass
    return reply


async def ask(
    address: str, path: str = CHAT, body: object = None, method: str = "POST", **headers: str
) -> Reply:
    """One request on a connection of its own."""
    connection = await Connection.to(address)
    try:
        await connection.send(path, body, method, **headers)
        return await connection.reply()
    finally:
        connection.close()


async def send_text(wire: Wire, task: Task, text: str, end: TaskEnd | None = None) -> None:
    """The batcher sends ``text`` in two frames."""
    tokens = wire.tokens(text)
    await wire.batcher.send(task, frame(0, tokens[:9]))
    final = last(min(9, len(tokens)), tokens[9:])
    if end is not None:
        final.final.end = end
    await wire.batcher.send(task, final)


async def answered(wire: Wire, asking: Awaitable[T], *texts: str, end: TaskEnd | None = None) -> T:
    """What ``asking`` gets when the batcher sends ``texts``, one for each task."""
    future = asyncio.ensure_future(asking)
    for text in texts:
        await send_text(wire, await wire.batcher.task(), text, end)
    return await future


def chat(text: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], **fields}


def events_in(body: bytes) -> list[Any]:
    """The events of a stream, the last as it stands."""
    *events, end = body.decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in (*events, end))
    read = [json.loads(event.removeprefix("data: ")) for event in events]
    return [*read, end.removeprefix("data: ")]
