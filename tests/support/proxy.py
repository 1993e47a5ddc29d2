"""A TCP proxy for one link between two processes, which can be cut, slowed down or reset while it is in use.

- pass: bytes go through as they come.
- drop: nothing goes through. Bytes wait and are delivered later, as TCP would repeat lost packets; new connections are
  accepted (the kernel does it) and stay silent.
- delay: every piece is held for a time, each way.
- reset: every connection ends with RST. Later ones go through.
"""

import asyncio
import contextlib
import socket
import struct
from enum import Enum
from types import TracebackType
from typing import Final, Self

from sluice.startup import LOOPBACK, free_port

_PIECE_BYTES: Final = 65_536
_RST: Final = struct.pack("ii", 1, 0)


class Mode(Enum):
    """How the proxy treats its connections now."""

    PASS = "pass"
    DROP = "drop"
    DELAY = "delay"


class Proxy:
    """Listens on a port of its own and connects to ``target`` for each connection.

    Attributes:
        port: where to connect instead of to ``target``.
        accepted: how many connections came.
    """

    def __init__(self, target: int | str, port: int | None = None) -> None:
        """``target``: a port, or an address on this machine."""
        self.port = port or free_port()
        self.accepted = 0
        self._target = target
        self._mode = Mode.PASS
        self._delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    def cut(self) -> None:
        """Nothing goes through until `heal`."""
        self._mode = Mode.DROP
        self._open.clear()

    def slow(self, delay_s: float) -> None:
        """Every piece takes ``delay_s`` longer, each way, until `heal`."""
        self._mode, self._delay_s = Mode.DELAY, delay_s
        self._open.set()

    def heal(self) -> None:
        """Bytes go through again, those that waited first."""
        self._mode = Mode.PASS
        self._open.set()

    def turn(self, target: int | str) -> None:
        """New connections go to another ``target``; those that are open end."""
        self._target = target
        self.reset()

    def reset(self) -> None:
        """Ends every connection with RST."""
        for task, writers in self._links.items():
            for writer in writers:
                _abort(writer)
            task.cancel()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, self.port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._links)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links[task] = [writer]
        self.accepted += 1
        try:
            await self._connect(reader, writer, self._links[task])
        except (OSError, asyncio.CancelledError):
            return  # a caught cancel: asyncio's server would log it as an error
        finally:
            for open_writer in self._links.pop(task):
                open_writer.close()

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        writers: list[asyncio.StreamWriter],
    ) -> None:
        await self._open.wait()
        there, to = await asyncio.open_connection(LOOPBACK, port_of(self._target))
        writers.append(to)
        for each in (writer, to):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(self._pump(reader, to), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One way, until its sender closes it (the other way may go on) or either side breaks."""
        try:
            while piece := await reader.read(_PIECE_BYTES):
                if self._mode is Mode.DELAY:
                    await asyncio.sleep(self._delay_s)
                await self._open.wait()
                writer.write(piece)
                await writer.drain()
            await self._open.wait()
            writer.write_eof()
        except (OSError, RuntimeError):  # uvloop says of a closed transport that it is closed
            _abort(writer)


def port_of(target: int | str) -> int:
    return int(str(target).rpartition(":")[2])


def _abort(writer: asyncio.StreamWriter) -> None:
    """Closes with RST."""
    if writer.is_closing():
        return
    with contextlib.suppress(OSError):
        plain = writer.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    writer.transport.abort()
