"""A JetStream key-value bucket: the last message of each subject, and writes that name the revision they replace."""

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Final, TypeVar

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import Header, StreamConfig
from nats.js.errors import APIError, NotFoundError

from sluice.errors import TransportUnavailable
from sluice.settings import Settings
from sluice.wire import jetstream, subjects
from sluice.wire.codec import MalformedMessage, pack, unpack
from sluice.wire.jetstream import answering

M = TypeVar("M", bound=Message)

logger = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
"""Longest wait for JetStream, seconds."""
_WHAT: Final = "what processes share cannot be read or written"
_WRONG_REVISION: Final = frozenset({10071, 10164})
"""JetStream's error codes for a write over another revision than the one that it names."""


class Bucket:
    """One bucket; call `start` or `open` first.

    All others but `restore` raise TransportUnavailable when JetStream does not answer within `ANSWER_S`. A refusal
    counts as no answer, except of `remove`.
    """

    def __init__(self, config: StreamConfig, replicas: int = 1) -> None:
        """Prepare a bucket that `replicas` servers of the NATS cluster keep."""
        assert config.name is not None, "buckets have names"
        self._replicas = replicas
        self._config = config
        self._stream: str = config.name
        self._prefix = subjects.bucket_prefix(config.name)
        self._jetstream: JetStreamContext | None = None

    async def start(self, client: Client) -> None:
        """Create the bucket, or update its limits.

        Raises:
            nats.errors.Error: JetStream does not answer, or refuses the limits.
        """
        self.open(client)
        await jetstream.ensure_stream(self._js, self._config, self._replicas)

    async def restore(self) -> None:
        """Create the bucket where NATS has lost it; raises as `start`."""
        await jetstream.ensure_stream(self._js, self._config, self._replicas, update=False)

    def open(self, client: Client) -> None:
        """Use a bucket that another process creates; it is empty until then, and cannot be written."""
        self._jetstream = client.jetstream(timeout=ANSWER_S)

    async def write(
        self, key: str, message: Message, last: int | None = None, ttl_s: float | None = None
    ) -> int | None:
        """Write `message`; return its revision, or None if `last` is not the revision of `key`.

        Args:
            key: The key, a part of a subject.
            message: The new value.
            last: 0: the key must be absent; None: whatever it has.
            ttl_s: it expires after this time, in seconds, at least 1; the bucket must allow it (`allow_msg_ttl`).
        """
        headers = {} if last is None else {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(last)}
        with answering(_WHAT):
            try:
                stored = await self._js.publish(
                    self._prefix + key,
                    pack(message),
                    timeout=ANSWER_S,
                    headers=headers,
                    msg_ttl=None if ttl_s is None else max(1.0, ttl_s),
                )
            except APIError as error:
                if error.err_code in _WRONG_REVISION:
                    return None
                raise
        return stored.seq

    async def read(self, key: str, kind: type[M]) -> tuple[M, int] | None:
        """Return the message of `key` with its revision, or None; raise TransportUnavailable if it is damaged, too."""
        entry = await self.read_payload(key)
        if entry is None:
            return None
        payload, revision = entry
        try:
            return unpack(kind, payload), revision
        except MalformedMessage as error:
            raise TransportUnavailable(f"{self._stream}: {key} is damaged: {error}") from error

    async def read_payload(self, key: str) -> tuple[bytes, int] | None:
        """Return the packed message of `key` with its revision, or None."""
        with answering(_WHAT):
            try:
                message = await self._js.get_last_msg(self._stream, self._prefix + key)
            except NotFoundError:
                return None
        assert message.seq is not None, "stored messages have one"
        return message.data or b"", message.seq

    async def state(self) -> tuple[int, int]:
        """Return a state that changes whenever something is written or removed."""
        with answering(_WHAT):
            info = await self._js.stream_info(self._stream)
        return info.state.last_seq, info.state.messages

    async def remove(self, revision: int) -> None:
        """Remove the message of that revision, unless another one has replaced it."""
        with answering(_WHAT), suppress(APIError):  # it is gone
            await self._js.delete_msg(self._stream, revision)

    async def purge(self, key: str) -> None:
        """Remove `key`, or with wildcards all keys that it matches."""
        with answering(_WHAT):
            await self._js.purge_stream(self._stream, subject=self._prefix + key)

    async def read_all(self, kind: type[M]) -> AsyncIterator[tuple[str, M]]:
        """Yield all messages with their keys, except damaged ones."""
        async for key, payload in self.read_payloads():
            try:
                yield key, unpack(kind, payload)
            except MalformedMessage as error:
                logger.error("%s: %s is damaged and left out: %s", self._stream, key, error)

    async def read_payloads(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield all packed messages with their keys."""
        messages = jetstream.stored_messages(self._js, self._stream, f"{self._prefix}>", ANSWER_S)
        with answering(_WHAT):
            async with aclosing(messages):
                async for message in messages:
                    yield message.subject.removeprefix(self._prefix), message.data

    @property
    def _js(self) -> JetStreamContext:
        if self._jetstream is None:
            raise TransportUnavailable("NATS is not connected")
        return self._jetstream


async def shared_secret(bucket: Bucket, name: str) -> str:
    """Return the secret of that name, the same for all gateways: the first one makes it.

    Raises:
        TransportUnavailable: JetStream does not answer.
    """
    await bucket.write(name, StringValue(value=secrets.token_hex()), last=0)
    entry = await bucket.read(name, StringValue)
    assert entry is not None, "it was there, or is written"
    return entry[0].value


async def mesh_key(settings: Settings, secrets_bucket: Bucket) -> str | None:
    """Return the key that processes show each other; None if calls need none. Raise as `shared_secret` does."""
    if not settings.identity.enabled:
        return None
    return settings.identity.mesh_key or await shared_secret(secrets_bucket, "mesh_key")
