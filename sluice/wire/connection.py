"""A process's connection to NATS: it reconnects forever, and reports when messages may have been lost."""

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, SlowConsumerError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError, ServiceUnavailableError

from sluice.settings import NatsSettings
from sluice.tls import AUTHORITIES, CERTIFICATE, ClientContext
from sluice.wire import jetstream, permissions
from sluice.wire.codec import MAX_MESSAGE_BYTES
from sluice.wire.patience import patiently

logger = logging.getLogger(__name__)

PENDING_BYTES_MAX: Final = 16 * 1024 * 1024
"""Most bytes that wait to be written while NATS is away. Beyond them `publish` raises, and receivers ask again."""
CLOSE_S: Final = 2.0
JETSTREAM_S: Final = 3.0
"""How long a process that starts waits for JetStream, seconds."""
PING_S: Final = 2.0
PING_OF_SEVERAL_S: Final = 0.5
"""How often a server is asked whether it answers, seconds; two missed answers end the connection. Where another server
can take over, callers wait only for this; where none can, a busy server is given more time."""
_PINGS_MAX: Final = 2
_RECONNECT_WAIT_S: Final = 0.25
_RETRY_S: Final = 0.05
_ACK: Final = "$JS.ACK."
_STREAM: Final = "Nats-Stream"
"""In what JetStream sends: the reply subject of what a consumer delivers, a header of what is read or republished."""
FLUSH_S: Final = 60
"""Upper bound for a flush whose caller may have given up, in seconds."""

Callback = Callable[[Msg], Awaitable[None]]
"""Handles a message of a subscription."""


class NatsUnreachable(ConnectionError):
    """NATS cannot be used: it does not answer, or it refuses the process or its streams, or does not fit a mesh.

    The message says where and what to do.
    """


class MeshClient(Client):
    """A client whose requests and flushes never hide a cancel, and that drops what JetStream sends uninvited.

    In Python 3.11 `asyncio.wait_for` returns its result when result and cancel come in one pass of the loop, and the
    task would run on as if nobody had cancelled it (https://github.com/python/cpython/issues/86296; 3.12 does not).
    """

    async def subscribe(  # type: ignore[override]  # with a callback alone
        self, subject: str, queue: str = "", cb: Callback | None = None, **options: Any
    ) -> Subscription:
        """Subscribe as nats-py does. `cb` gets nothing from JetStream unless `subject` is an inbox, for its replies."""
        inbox = subject.startswith("_INBOX")
        callback = cb if cb is None or inbox else partial(self._call, cb)
        return await super().subscribe(subject, queue, callback, **options)

    async def _call(self, callback: Callback, message: Msg) -> None:
        if message.reply.startswith(_ACK) or (message.headers and _STREAM in message.headers):
            logger.warning("NATS: dropped messages from JetStream to %s", message.subject)
        else:
            await callback(message)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Request as nats-py does, and never hide a cancel."""
        with _cancels_seen():
            return await super().request(subject, payload, timeout, old_style, headers)

    async def flush(self, timeout: int = 10) -> None:
        """Flush as nats-py does, and never hide a cancel.

        nats-py stops reading when the answer comes after its flush was cancelled, so each flush waits for its answer,
        or for `FLUSH_S`, when pings have long ended a dead link.
        """
        flushing = asyncio.create_task(super().flush(FLUSH_S))
        flushing.add_done_callback(_note_error)
        async with asyncio.timeout(timeout):
            await asyncio.shield(flushing)


def _note_error(flushing: asyncio.Task[None]) -> None:
    """Retrieve the error of a flush that nobody waits for any more."""
    if not flushing.cancelled():
        flushing.exception()


@contextlib.contextmanager
def _cancels_seen() -> Iterator[None]:
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    yield
    if task.cancelling() > before:
        raise asyncio.CancelledError


async def connect(
    settings: NatsSettings,
    kind: str,
    process: str,
    on_loss: Callable[[], None],
    tls: Path | None = None,
) -> MeshClient:
    """Connect to `settings.url`; create the stream of dead letters if the process is a gateway or the operator.

    Args:
        settings: The section `nats`; its `url` is set.
        kind: Kind of the process, such as `permissions.GATEWAY`.
        process: Id of the process.
        on_loss: Called when messages to this process may have been dropped.
        tls: Folder of the process's certificate; None: not encrypted.

    Raises:
        NatsUnreachable: no answer within `settings.connect_s` seconds, credentials or stream are refused, or the server
            offers no TLS or takes too small messages.
        SettingsError: the certificate cannot be used.
    """
    assert settings.url is not None, "checked before"
    logging.getLogger("asyncio").addFilter(_is_news)
    made = _Connection(settings.url, tls, on_loss)
    try:
        async with asyncio.timeout(settings.connect_s) as made.starting:
            await made.open(kind, process)
            _check_payload(made.client, settings.url)
            if kind in (permissions.GATEWAY, permissions.OPERATOR):
                await _ensure_streams(made.client, settings)
        made.starting = None
    except NatsUnreachable:
        await _abandon(made.client)
        raise
    except (TimeoutError, OSError, NatsError) as error:
        await _abandon(made.client)
        where = f"NATS at {redact_url(settings.url)}"
        if isinstance(error, APIError):
            raise NatsUnreachable(f"JetStream of {where} refuses its streams: {error}") from error
        raise NatsUnreachable(
            f"{where} does not answer within {settings.connect_s:g} s; start one or set nats.url"
        ) from error
    return made.client


class _Connection:
    """A connection, and what nats-py tells about it.

    Attributes:
        starting: the time that it may take to be made; None: it has been made.
    """

    def __init__(self, url: str, tls: Path | None, on_loss: Callable[[], None]) -> None:
        self.client = MeshClient()
        self.starting: asyncio.Timeout | None = None
        self._url = url
        self._ping_s = PING_OF_SEVERAL_S if "," in url else PING_S
        self._tls = tls
        self._context = None if tls is None else ClientContext(tls)
        self._on_loss = on_loss

    async def open(self, kind: str, process: str) -> None:
        """Connect; raise what nats-py raises, or NatsUnreachable if credentials are refused."""
        servers = self._url.split(",")
        await self.client.connect(
            # Each process has its own order, and tries a server that it has lost last.
            random.sample(servers, len(servers)),
            dont_randomize=True,
            name=f"{kind} {process}",
            inbox_prefix=permissions.inbox(kind, process),
            tls=None if self._context is None else self._context.context,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # fractions work
            ping_interval=self._ping_s,  # type: ignore[arg-type]  # as above
            max_outstanding_pings=_PINGS_MAX,
            pending_size=PENDING_BYTES_MAX,
            error_cb=self._on_error,
            reconnected_cb=self._on_reconnected,
            disconnected_cb=self._on_disconnected,
        )
        if self._context is not None:
            await self._check_encrypted(self._context)
        await self._limit_unsent()

    async def _check_encrypted(self, tls: ClientContext) -> None:
        """Raise NatsUnreachable if the server offers no TLS: nats-py would go on unencrypted.

        A second connection reads the server's greeting, which nats-py does not show.
        """
        server = self.client.connected_url
        assert server is not None, "it has just connected"
        reader, writer = await asyncio.open_connection(server.hostname, server.port)
        try:
            greeting = json.loads((await reader.readline()).removeprefix(b"INFO "))
            if not greeting.get("tls_required"):
                raise NatsUnreachable(
                    f"NATS at {redact_url(self._url)} offers no TLS, and tls.mesh is set"
                )
            # Without a handshake the server would log an error.
            await writer.start_tls(tls.context, server_hostname=server.hostname)
        finally:
            writer.close()

    async def _limit_unsent(self) -> None:
        """Let the kernel end this connection when the server stops taking data.

        nats-py leaves a dead connection only after it has written all that is buffered.
        """
        server = self.client.connected_url
        if server is not None and server.port is not None:
            limit_s = self._ping_s * (_PINGS_MAX + 1)
            await asyncio.to_thread(_limit_unacknowledged, server.port, limit_s)

    async def _on_error(self, error: Exception) -> None:
        refused = None if self.starting is None else _refusal(self._url, self._tls, error)
        if refused is not None:
            raise refused from error
        # Denied publishes, slow consumers and broken links arrive here, and only here.
        # Without a link every failed try to reconnect does so too: those are not worth a line.
        level = logging.WARNING if self.client.is_connected else logging.DEBUG
        logger.log(level, "NATS: %s: %s", type(error).__name__, error)
        if isinstance(error, SlowConsumerError):
            self._on_loss()
        # In Python 3.11 a connection that is refused at the very moment of the cancel hides it.
        if self.starting and self.starting.expired():
            raise TimeoutError

    async def _on_reconnected(self) -> None:
        logger.info("NATS: connected again")
        self._on_loss()
        await self._limit_unsent()

    async def _on_disconnected(self) -> None:
        if not (self.client.is_draining or self.client.is_closed):
            logger.warning("NATS: connection lost")
        if self._context is not None:
            self._context.refresh()


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a log record of asyncio matters: at the end of each encrypted stream it warns of nats-py."""
    return not str(record.msg).startswith("returning true from eof_received()")


async def _abandon(client: Client) -> None:
    """Close a connection that failed; after a refused certificate nobody confirms it."""
    with contextlib.suppress(TimeoutError, NatsError, OSError, RuntimeError):
        async with asyncio.timeout(CLOSE_S):
            await client.close()


def redact_url(url: str) -> str:
    """Return `url` without the users and passwords in it."""
    return ",".join(re.sub("//[^/]*@", "//", one) for one in url.split(","))


def _refusal(url: str, tls: Path | None, error: Exception) -> NatsUnreachable | None:
    """Return the error if one side rejected the credentials of the other; else None."""
    where, refused = f"NATS at {redact_url(url)}", "authorization violation" in str(error).lower()
    if tls is None:
        help_ = "nats.url needs its user, nats://USER:PASSWORD@HOST:PORT, or tls.mesh a certificate"
        return NatsUnreachable(f"{where} refuses the credentials: {help_}") if refused else None
    if isinstance(error, ssl.SSLCertVerificationError):
        return NatsUnreachable(
            f"{where} is not trusted by {tls / AUTHORITIES}: {error.verify_message}"
        )
    if refused or isinstance(error, ssl.SSLError):
        return NatsUnreachable(f"{where} refuses the certificate {tls / CERTIFICATE}: {error}")
    return None


def _limit_unacknowledged(port: int, limit_s: float) -> None:
    """Set TCP_USER_TIMEOUT on the sockets of this process that are connected to `port`."""
    for name in os.listdir("/proc/self/fd"):
        # A file that is closed meanwhile, or a socket without a peer, raises OSError and is not meant.
        with contextlib.suppress(OSError):
            number = int(name)
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as link:
                    if link.getpeername()[1:2] == (port,):
                        limit_ms = round(limit_s * 1000)
                        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def _check_payload(client: Client, url: str) -> None:
    """Raise NatsUnreachable when the server does not take the largest messages of a mesh."""
    if client.max_payload < MAX_MESSAGE_BYTES:
        raise NatsUnreachable(
            f"NATS at {redact_url(url)}: max_payload is {client.max_payload}, and messages of a mesh have up to "
            f"{MAX_MESSAGE_BYTES} bytes; set max_payload: {MAX_MESSAGE_BYTES} in its configuration"
        )


async def disconnect(client: Client) -> None:
    """Send what is pending if there is a server to take it, and close the connection."""
    if client.is_connected:
        try:
            await settle(client, CLOSE_S)
        except (TimeoutError, NatsError, OSError, RuntimeError):  # of a socket that has just closed
            logger.warning("NATS: the last messages may not have been sent")
    # Between two tries to reconnect nats-py writes what waits to a transport that is closed; uvloop raises.
    with contextlib.suppress(RuntimeError):
        await client.close()


async def settle(client: Client, timeout_s: float) -> None:
    """Wait until the server has processed everything sent so far.

    nats-py 2.16 writes the PING of `flush` straight to the socket, ahead of commands that wait for its flusher. So
    the first flush proves nothing about them. While it waits the flusher runs; the second PING is behind them.

    Raises:
        NatsUnreachable: the server did not answer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await client.flush()
            await client.flush()
    except (TimeoutError, NatsError) as error:
        raise NatsUnreachable(f"NATS does not answer within {timeout_s:g} s any more") from error


async def _ensure_streams(client: Client, settings: NatsSettings) -> None:
    """Create the stream of dead letters; a server accepts connections a moment before its JetStream answers.

    A cluster may have no leader for longer; then the process starts without the stream.
    """
    passing = (NoRespondersError, ServiceUnavailableError, NatsTimeoutError)
    # An attempt that begins at the end of the bound takes as long once more.
    half_s = JETSTREAM_S / 2
    try:
        await patiently(
            lambda: jetstream.ensure_stream(
                client.jetstream(timeout=half_s), jetstream.DEAD_LETTERS, settings.replicas
            ),
            passing,
            bound_s=half_s,
            wait_s=_RETRY_S,
        )
    except passing:
        logger.warning("JetStream of NATS does not answer: dead letters are not kept")
