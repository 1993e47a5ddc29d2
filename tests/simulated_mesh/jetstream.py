"""JetStream in virtual time, as far as batchers and gateways use it: it keeps dead letters.

What a publisher had no answer for may be stored all the same.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import nats.errors
from nats.js.api import PubAck, StreamConfig

from tests.simulated_mesh.nats import ANSWER_S, Connection, NatsServer


class JetStreamServer:
    """The streams of a `NatsServer`.

    Attributes:
        streams: by name, the subjects of their messages.
    """

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.streams: dict[str, list[str]] = {}
        self.away_until = 0.0
        server.jetstream = self

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.server.loop.time()

    def client(self, connection: Connection) -> "JetStreamClient":
        """As `Client.jetstream`."""
        return JetStreamClient(connection, self)

    def restart(self, seconds: float) -> None:
        """Ends, and begins again."""
        self.away_until = self.now + seconds


class JetStreamClient:
    """What `nats.js.JetStreamContext` is to the processes of the mesh."""

    def __init__(self, connection: Connection, server: JetStreamServer) -> None:
        self._connection, self._server = connection, server

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> PubAck:
        """Returns when the message is stored."""
        (stream,) = self._server.streams
        await self._ask(lambda: self._server.streams[stream].append(subject), timeout)
        return PubAck(stream, len(self._server.streams[stream]))

    async def add_stream(self, config: StreamConfig) -> None:
        """Creates it once."""
        assert config.name is not None
        name = config.name
        await self._ask(lambda: self._server.streams.setdefault(name, []))

    async def _ask(self, act: Any, timeout: float | None = None) -> Any:
        """Does ``act`` at the server, and brings back what it gives."""
        answer = self._server.server.loop.create_future()

        def done(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        def arrive() -> None:
            if self._server.now >= self._server.away_until:
                result = act()
                self._connection._come_down(lambda: done(result))

        self._connection._up(arrive)
        try:
            async with asyncio.timeout(timeout if timeout is not None else ANSWER_S):
                return await answer
        except TimeoutError:
            raise nats.errors.TimeoutError from None
