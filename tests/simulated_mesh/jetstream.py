"""JetStream's work queue in virtual time, as far as batchers and gateways use it.

As in the server: a message is delivered again when it was not acknowledged for the ack wait; any acknowledgement
deletes it, also a stale one of an earlier owner. What a publisher had no answer for may be stored all the same. A
restart loses the open pulls, and nothing that was stored.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import (
    ConsumerConfig,
    ConsumerInfo,
    PubAck,
    RawStreamMsg,
    SequenceInfo,
    StreamConfig,
    StreamInfo,
    StreamState,
)
from nats.js.errors import NotFoundError

from tests.simulated_mesh.nats import ANSWER_S, Connection, NatsServer

TICK_S: Final = 0.25
"""How late JetStream may be with what is due."""
API: Final = "$JS.API.CONSUMER.MSG.NEXT."
ACK: Final = "$JS.ACK."


@dataclass
class Stored:
    """A message of a stream."""

    message: Msg
    deliveries: int = 0
    due_at: float | None = None
    """When it is delivered again; None: it is not out."""


@dataclass
class Stream:
    """See `StreamConfig`."""

    prefix: str
    messages: dict[int, Stored] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    sequence: int = 0


@dataclass
class Pull:
    """A request for messages."""

    reply: str
    left: int
    expires_at: float
    heartbeat_s: float
    silent_since: float


@dataclass
class Consumer:
    """See `ConsumerConfig`."""

    name: str
    stream: Stream
    config: ConsumerConfig
    delivered: int = 0
    pulls: list[Pull] = field(default_factory=list)

    def next(self, now: float) -> tuple[int, Stored] | None:
        """The message that goes out next."""
        out = [stored.due_at for stored in self.mine().values() if stored.due_at is not None]
        if sum(due_at > now for due_at in out) >= self.config.max_ack_pending:
            return None
        for sequence, stored in self.mine().items():
            if stored.due_at is None or stored.due_at <= now:
                return sequence, stored
        return None

    def mine(self) -> dict[int, Stored]:
        """The messages of its subject."""
        wanted = self.config.filter_subject
        messages = self.stream.messages.items()
        return {number: one for number, one in messages if one.message.subject == wanted}


class JetStreamServer:
    """The streams and consumers of a `NatsServer`."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.streams: dict[str, Stream] = {}
        self.consumers: dict[str, Consumer] = {}
        self.away_until = 0.0
        server.jetstream = self
        server.soon(self._tick, TICK_S)

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.server.loop.time()

    def client(self, connection: Connection) -> "JetStreamClient":
        """As `Client.jetstream`."""
        return JetStreamClient(connection, self)

    def stream_of(self, subject: str) -> Stream | None:
        """The stream that stores what is published on ``subject``."""
        return next((s for s in self.streams.values() if subject.startswith(s.prefix)), None)

    def takes(self, message: Msg) -> bool:
        """Handles what is meant for JetStream."""
        if message.subject.startswith(API):
            self._pull(message)
        elif message.subject.startswith(ACK):
            self._settle(message)
        else:
            return False
        return True

    def store(self, message: Msg) -> int:
        """Stores a message once by its id; returns its number."""
        stream = self.stream_of(message.subject)
        assert stream is not None, message.subject
        name = (message.headers or {}).get("Nats-Msg-Id")
        if name in stream.ids:
            return stream.ids[name]
        stream.sequence += 1
        stream.messages[stream.sequence] = Stored(message)
        if name is not None:
            stream.ids[name] = stream.sequence
        self._serve_all()
        return stream.sequence

    def restart(self, seconds: float) -> None:
        """Ends and begins again: open pulls are lost."""
        self.away_until = self.now + seconds
        for consumer in self.consumers.values():
            consumer.pulls.clear()

    def _pull(self, message: Msg) -> None:
        consumer = self.consumers.get(message.subject.rpartition(".")[2])
        if consumer is None:
            self._status(message.reply, "503", "")
            return
        asked = json.loads(message.data)
        consumer.pulls.append(
            Pull(
                message.reply,
                asked["batch"],
                self.now + asked["expires"] / 1e9,
                asked.get("idle_heartbeat", 0) / 1e9,
                self.now,
            )
        )
        self._serve(consumer)

    def _settle(self, message: Msg) -> None:
        data = Msg.Metadata._from_reply(message.subject)
        stream = self.streams[data.stream]
        sequence = data.sequence.stream
        stored = stream.messages.get(sequence)
        if stored is None:
            return
        if message.data.startswith(Msg.Ack.Progress):
            stored.due_at = self.now + self.consumers[data.consumer].config.ack_wait
        elif message.data.startswith(Msg.Ack.Nak):
            stored.due_at = None
        else:
            del stream.messages[sequence]
        self._serve_all()

    def _serve_all(self) -> None:
        for consumer in self.consumers.values():
            self._serve(consumer)

    def _serve(self, consumer: Consumer) -> None:
        now = self.now
        # As in the server: a pull whose inbox nobody hears, that of a process that has crashed, gets nothing.
        consumer.pulls = [pull for pull in consumer.pulls if self.server.hears(pull.reply)]
        while consumer.pulls and now >= self.away_until:
            found = consumer.next(now)
            if found is None:
                return
            pull = consumer.pulls[0]
            pull.left -= 1
            pull.silent_since = now
            if not pull.left:
                consumer.pulls.pop(0)
            self._deliver(consumer, pull.reply, *found)

    def _deliver(self, consumer: Consumer, to: str, sequence: int, stored: Stored) -> None:
        stored.deliveries += 1
        stored.due_at = self.now + consumer.config.ack_wait
        consumer.delivered = max(consumer.delivered, sequence)
        stream = next(name for name, one in self.streams.items() if one is consumer.stream)
        pending = sum(one.due_at is None for one in consumer.mine().values())
        time_ns = int(self.now * 1e9)
        reply = f"$JS.ACK.{stream}.{consumer.name}.{stored.deliveries}.{sequence}.{sequence}.{time_ns}.{pending}"
        message = stored.message
        self.server.route(
            Msg(None, message.subject, reply, message.data, message.headers),  # type: ignore[arg-type]
            to,
        )

    def _status(self, to: str, status: str, description: str) -> None:
        headers = {"Status": status, "Description": description}
        self.server.route(Msg(None, to, "", b"", headers), to)  # type: ignore[arg-type]

    def _tick(self) -> None:
        self.server.soon(self._tick, self.now + TICK_S)
        if self.now < self.away_until:
            return
        for consumer in self.consumers.values():
            self._watch(consumer)
            self._serve(consumer)

    def _watch(self, consumer: Consumer) -> None:
        """Ends pulls and sends heartbeats."""
        now = self.now
        for pull in list(consumer.pulls):
            if pull.expires_at <= now:
                consumer.pulls.remove(pull)
                self._status(pull.reply, "408", "Request Timeout")
            elif pull.heartbeat_s and now - pull.silent_since >= pull.heartbeat_s:
                pull.silent_since = now
                self._status(pull.reply, "100", "Idle Heartbeat")


class JetStreamClient:
    """What `nats.js.JetStreamContext` is to the processes of the mesh."""

    def __init__(self, connection: Connection, server: JetStreamServer) -> None:
        self._connection, self._server = connection, server

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float | None = None,
        stream: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> PubAck:
        """Returns when the message is stored."""
        message = Msg(None, subject, "", bytes(payload), dict(headers or {}) or None)  # type: ignore[arg-type]
        sequence = await self._ask(lambda: self._server.store(message), timeout)
        return PubAck(stream or "", sequence)

    async def add_stream(self, config: StreamConfig) -> None:
        """Creates it once."""
        assert config.name is not None
        assert config.subjects is not None
        prefix = config.subjects[0].removesuffix(">")
        name = config.name
        await self._ask(lambda: self._server.streams.setdefault(name, Stream(prefix)))

    async def add_consumer(self, stream: str, config: ConsumerConfig) -> None:
        """Creates it once."""
        name = config.durable_name
        assert name is not None

        def add() -> None:
            consumers = self._server.consumers
            consumers.setdefault(name, Consumer(name, self._server.streams[stream], config))

        await self._ask(add)

    async def stream_info(self, name: str, subjects_filter: str) -> StreamInfo:
        """With the number of messages of each subject."""

        def count() -> dict[str, int] | None:
            if name not in self._server.streams:
                return None
            prefix = subjects_filter.removesuffix("*")
            found = [one.message.subject for one in self._server.streams[name].messages.values()]
            return dict(Counter(subject for subject in found if subject.startswith(prefix)))

        counts = await self._ask(count)
        if counts is None:
            raise NotFoundError
        state = StreamState(len(counts), 0, 0, 0, 0, subjects=counts)
        return StreamInfo(StreamConfig(name=name), state)

    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        """With the number of messages that wait, and the last one that was delivered."""

        def count() -> tuple[int, int] | None:
            found = self._server.consumers.get(consumer)
            if found is None:
                return None
            waiting = sum(stored.deliveries == 0 for stored in found.mine().values())
            return waiting, found.delivered

        counts = await self._ask(count)
        if counts is None:
            raise NotFoundError
        return ConsumerInfo(
            name=consumer,
            stream_name=stream,
            config=self._server.consumers[consumer].config,
            created=datetime.fromtimestamp(0, UTC),
            delivered=SequenceInfo(counts[1], counts[1]),
            num_pending=counts[0],
        )

    async def get_msg(self, stream: str, seq: int) -> RawStreamMsg:
        """A stored message."""
        stored = await self._ask(lambda: self._server.streams[stream].messages.get(seq))
        if stored is None:
            raise NotFoundError
        message = stored.message
        return RawStreamMsg(
            subject=message.subject, seq=seq, data=message.data, headers=message.headers
        )

    async def get_last_msg(self, stream: str, subject: str) -> RawStreamMsg:
        """The last stored message of a subject."""

        def find() -> int:
            found = self._server.streams.get(stream)
            messages = found.messages.items() if found else ()
            return max((seq for seq, one in messages if one.message.subject == subject), default=0)

        seq = await self._ask(find)
        if not seq:
            raise NotFoundError
        return await self.get_msg(stream, seq)

    async def delete_msg(self, stream: str, seq: int) -> bool:
        """Deletes a stored message."""
        return bool(await self._ask(lambda: self._server.streams[stream].messages.pop(seq, None)))

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
