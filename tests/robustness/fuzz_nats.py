"""A NATS without a server for fuzzing: what a process subscribes to can be called, what it publishes is passed on."""

import itertools
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

from nats.aio.msg import Msg
from nats.errors import BadSubjectError, MaxPayloadError, NoRespondersError
from nats.js.errors import NotFoundError

from sluice.wire.codec import MAX_MESSAGE_BYTES

Handler = Callable[[Msg], Awaitable[None]]


class MemoryNats:
    """Stands for `nats.aio.client.Client` and its JetStream, which has nothing stored and stores everything.

    Attributes:
        handlers: by the subject of the subscription.
        published: called with the subject and the payload of what is published.
    """

    is_connected: Final = True
    is_closed: Final = False
    max_payload: Final = MAX_MESSAGE_BYTES

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.published: Callable[[str, bytes], None] = lambda *_: None
        self._sequence = itertools.count(1)

    async def subscribe(self, subject: str, cb: Handler, **_: Any) -> "MemoryNats":
        """Keeps the handler; it is the subscription too."""
        self.handlers[subject] = cb
        return self

    async def feed(
        self,
        pattern: str,
        payload: bytes,
        subject: str = "",
        reply: str = "_INBOX.fuzz.1",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Gives a message to the handler of ``pattern``, as if it had come on ``subject``."""
        message: Any = Msg(self, subject or pattern, reply, payload, dict(headers or {}))  # type: ignore[arg-type]
        await self.handlers[pattern](message)

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        **_: Any,
    ) -> Any:
        """Also JetStream's, whose answer is the sequence. What nats-py refuses is refused."""
        for one in (subject, reply) if reply else (subject,):
            if not one or one.split() != [one] or "" in one.split("."):
                raise BadSubjectError
        if len(payload) > self.max_payload:
            raise MaxPayloadError
        # The server closes the connection of who breaks a header's line.
        for name, value in (headers or {}).items():
            assert not {"\r", "\n"} & {*name, *value}, f"a header breaks its line: {name}: {value}"
        self.published(subject, payload)
        return SimpleNamespace(seq=next(self._sequence))

    async def request(self, *_: Any, **__: Any) -> Any:
        """Nobody is there."""
        raise NoRespondersError

    def jetstream(self, **_: Any) -> "MemoryNats":
        """It is one object."""
        return self

    async def _nothing(self, *_: Any, **__: Any) -> bool:
        """All has been published, every stream exists, and nobody pulls."""
        return True

    flush = drain = close = unsubscribe = add_stream = add_consumer = purge_stream = _nothing

    async def get_last_msg(self, *_: Any, **__: Any) -> Any:
        """Nothing is stored."""
        raise NotFoundError

    consumer_info = stream_info = pull_subscribe = delete_msg = get_last_msg
