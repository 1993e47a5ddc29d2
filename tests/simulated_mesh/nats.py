"""A NATS server in virtual time, and connections to it that look like those of nats-py.

A connection is one stream of bytes each way: in order, late, and sometimes cut. A cut either only holds everything back
until it heals, as a stopped machine does, or breaks the connection: then what was on its way is lost, the server has no
subscriptions of it meanwhile (requests to them get "no responders"), and the process hears of the loss when it is
connected again. Core messages of the mesh may also be lost or doubled one by one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg

from sluice.wire.codec import pack, read_bundle
from tests.simulated_mesh.loop import SimulatedProcess, VirtualLoop

MAX_PAYLOAD: Final = 1 << 20
ANSWER_S: Final = 5.0
"""How long nats-py waits for an answer of JetStream by default."""
FRAMES: Final = "sluice.frames."
AFTER: Final = 100
"""Attempts by which a forged frame is ahead."""
LOSSY: Final = "sluice."
"""Beginning of the subjects whose messages may be lost or doubled."""


@dataclass
class Faults:
    """How bad the network is now.

    Attributes:
        delay_s: longest delay of a message.
        loss: share of the core messages that are lost.
        double: share of those that come twice.
        forge: share of the frame bundles that come again as of the attempt before or after, with other tokens.
    """

    delay_s: float = 0.002
    loss: float = 0.0
    double: float = 0.0
    forge: float = 0.0


@dataclass(eq=False)
class Subscription:
    """One subscription of a connection; its messages are handled one after the other."""

    connection: "Connection"
    pattern: tuple[str, ...]
    queue: str
    handle: Callable[[Msg], Awaitable[None]]
    waiting: asyncio.Queue[Msg] = field(default_factory=asyncio.Queue)

    def matches(self, subject: str) -> bool:
        """Whether messages on ``subject`` come here."""
        tokens = subject.split(".")
        for place, wanted in enumerate(self.pattern):
            if wanted == ">":
                return len(tokens) > place
            if place >= len(tokens) or wanted not in ("*", tokens[place]):
                return False
        return len(tokens) == len(self.pattern)

    async def run(self) -> None:
        """Handles messages for ever."""
        while True:
            await self.handle(await self.waiting.get())
            self.waiting.task_done()

    async def unsubscribe(self) -> None:
        """The server sends nothing more, and what has come is discarded."""
        self.connection.server.subscriptions.pop(self, None)
        self.handle = _discard

    async def drain(self) -> None:
        """Handles what has come, and ends."""
        self.connection.server.subscriptions.pop(self, None)
        await self.connection.flush()
        await self.waiting.join()


async def _discard(_: Msg) -> None:
    pass


class NatsServer:
    """Routes messages between `Connection`s.

    Attributes:
        jetstream: its streams; set by `tests.simulated_mesh.jetstream`.
    """

    def __init__(self, loop: VirtualLoop, chance: Random) -> None:
        self.loop, self.chance = loop, chance
        self.faults = Faults()
        self.subscriptions: dict[Subscription, None] = {}
        self.jetstream: Any = None
        self._numbers = count(1)

    def number(self) -> int:
        """Another one each time."""
        return next(self._numbers)

    def soon(self, act: Callable[[], object], at: float) -> None:
        """Does ``act`` at a time, in no process of the mesh."""
        self.loop.call_at(at, act, context=Context())

    def delay_s(self) -> float:
        """Of one message on one link."""
        return self.chance.random() * self.faults.delay_s

    def hears(self, subject: str) -> bool:
        """Whether somebody has subscribed to ``subject``."""
        return any(one.matches(subject) for one in self.subscriptions)

    def route(self, message: Msg, to: str = "") -> None:
        """Sends a message to everybody who has subscribed to ``to``, by default its subject."""
        to = to or message.subject
        found = [one for one in self.subscriptions if one.matches(to)]
        groups = {one.queue: [each for each in found if each.queue == one.queue] for one in found}
        chosen = groups.pop("", []) + [self.chance.choice(group) for group in groups.values()]
        if not chosen and message.reply:
            self.route(Msg(None, message.reply, "", b"", {"Status": "503"}))  # type: ignore[arg-type]
        for subscription in chosen:
            for _ in range(self._copies(to)):
                if to.startswith(FRAMES) and self.chance.random() < self.faults.forge:
                    subscription.connection.down(subscription, self._forged(message))
                subscription.connection.down(subscription, message)

    def _forged(self, message: Msg) -> Msg:
        """A bundle as an owner before or after would send it: whoever takes it gets wrong tokens.

        It may be so late that the next attempt has begun meanwhile, so "after" is an attempt that none reaches.
        """
        bundle = read_bundle(message.data)
        for frame in bundle.frames:
            frame.attempt += AFTER if frame.attempt == 0 else self.chance.choice([-1, AFTER])
            frame.token_ids[:] = [token + 1 for token in frame.token_ids]
        return Msg(None, message.subject, "", pack(bundle), message.headers)  # type: ignore[arg-type]

    def _copies(self, subject: str) -> int:
        lot = self.chance.random()
        # Replies to requests are as easily lost as the requests.
        if not subject.startswith((LOSSY, "_INBOX.request")):
            return 1
        return 0 if lot < self.faults.loss else 1 + (lot > 1 - self.faults.double)


class Connection:
    """What `nats.aio.client.Client` is to the processes of the mesh, as far as they use it.

    Attributes:
        on_loss: called when messages may have been lost; see `sluice.wire.connection.connect`.
    """

    max_payload = MAX_PAYLOAD
    is_draining = False

    def __init__(self, server: NatsServer, process: SimulatedProcess) -> None:
        self.server, self.process = server, process
        self.on_loss: Callable[[], None] = lambda: None
        self.is_closed = False
        self._up_at = self._down_at = 0.0
        self._healed_at = 0.0
        self._breaks = 0
        self._broken = False
        self._replies: dict[str, asyncio.Future[Msg]] = {}
        self._reply_inbox = f"_INBOX.request.{server.number()}"
        self._pending: list[Callable[[], None]] = []
        self._own: list[Subscription] = []
        self._listening: Subscription | None = None

    @property
    def is_connected(self) -> bool:
        """As far as the process knows."""
        return not (self._broken or self.is_closed)

    # What processes call.

    def new_inbox(self) -> str:
        """A subject that nobody else has."""
        return f"_INBOX.{self.server.number()}"

    def jetstream(self, timeout: float | None = None) -> Any:
        """The client of JetStream."""
        return self.server.jetstream.client(self)

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        """As in nats-py, with a callback."""
        assert cb is not None
        subscription = Subscription(self, tuple(subject.split(".")), queue, cb)
        self._own.append(subscription)
        self.process.spawn(subscription.run())
        self._up(lambda: self.server.subscriptions.setdefault(subscription))
        return subscription

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """As in nats-py: waits while the link is broken, up to a limit that is not reached here."""
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        self._send(subject, payload, reply, headers)

    def _send(
        self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None
    ) -> None:
        message = Msg(None, subject, reply, bytes(payload), dict(headers or {}) or None)  # type: ignore[arg-type]
        self._up(lambda: self.server.route(message))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        headers: Mapping[str, str] | None = None,
    ) -> Msg:
        """As in nats-py."""
        if self._listening is None:
            self._listening = await self.subscribe(f"{self._reply_inbox}.*", cb=self._on_reply)
        reply = f"{self._reply_inbox}.{self.server.number()}"
        self._replies[reply] = self.server.loop.create_future()
        try:
            await self.publish(subject, payload, reply, headers)
            async with asyncio.timeout(timeout):
                answer = await self._replies[reply]
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        finally:
            del self._replies[reply]
        if (answer.headers or {}).get("Status") == "503":
            raise nats.errors.NoRespondersError
        return answer

    async def flush(self, timeout: float = 10) -> None:
        """Returns when the server has taken everything so far."""
        taken = self.server.loop.create_future()
        self._up(lambda: self._come_down(lambda: taken.done() or taken.set_result(None)))
        async with asyncio.timeout(timeout):
            await taken

    async def close(self) -> None:
        """Ends the connection."""
        self.is_closed = True
        for subscription in self._own:
            self._up(lambda one=subscription: self.server.subscriptions.pop(one, None))

    # The network.

    def hold(self, seconds: float) -> None:
        """Nothing arrives either way for so long; nothing is lost."""
        self._healed_at = max(self._healed_at, self.server.loop.time() + seconds)

    def cut(self, seconds: float) -> None:
        """The connection breaks; it can be made again after so long."""
        self._breaks += 1
        self._broken = True
        self._healed_at = max(self._healed_at, self.server.loop.time() + seconds)
        for subscription in self._own:
            self.server.subscriptions.pop(subscription, None)
        self.process.soon(self._reconnect, self._breaks, delay_s=seconds + 0.25)

    def gone(self) -> None:
        """The process has crashed: the server sees it after all that was sent before."""
        self._up(self._forget)

    def _forget(self) -> None:
        for subscription in self._own:
            self.server.subscriptions.pop(subscription, None)

    def down(self, subscription: Subscription, message: Msg) -> None:
        """Sends a message to the process."""
        copy = Msg(self, message.subject, message.reply, message.data, message.headers)  # type: ignore[arg-type]
        self._come_down(lambda: subscription.waiting.put_nowait(copy))

    def _reconnect(self, breaks: int) -> None:
        if breaks != self._breaks or self.is_closed:
            return
        self._broken = False
        pending, self._pending = self._pending, []
        for subscription in self._own:
            self._up(lambda one=subscription: self.server.subscriptions.setdefault(one))
        for act in pending:
            self._up(act)
        self.on_loss()

    def _up(self, act: Callable[[], object]) -> None:
        """Does ``act`` at the server, after everything that was sent before."""
        if self._broken:
            self._pending.append(act)
            return
        loop, breaks = self.server.loop, self._breaks
        self._up_at = max(self._up_at, max(self._healed_at, loop.time()) + self.server.delay_s())

        def arrive() -> None:
            if breaks == self._breaks:
                act()

        self.server.soon(arrive, self._up_at)

    def _come_down(self, act: Callable[[], object]) -> None:
        if self._broken:
            return
        loop, breaks = self.server.loop, self._breaks
        self._down_at = max(
            self._down_at, max(self._healed_at, loop.time()) + self.server.delay_s()
        )

        def arrive() -> None:
            if breaks == self._breaks:
                act()

        self.process.soon(arrive, delay_s=self._down_at - loop.time())

    async def _on_reply(self, message: Msg) -> None:
        waiting = self._replies.get(message.subject)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
