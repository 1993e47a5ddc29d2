"""An HTTP call: its body within its limits, its answer, and the end of its work when the client has gone.

`Endpoint` serves a route: what all calls pass (`gateway.admission.arrivals`), and the checks that browsers make
necessary.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.admission.arrivals import Arrivals
from gateway.admission.request_context import Call, fail_with
from gateway.http.answers import encode
from gateway.http.api import api_of
from gateway.http.encodings import CONTENT_ENCODING, EncodingUnsupported, encoding_of, gunzip
from gateway.http.requests import (
    class_of,
    host_of,
    is_foreign_page,
    metadata_of,
    parse_json,
)
from gateway.identity.authenticator import AUTHORIZATION
from gateway.identity.caller import Caller
from gateway.telemetry.request_log import new_request_id
from gateway.validation.requests import UNSTATED_CLASS
from sluice.errors import (
    InvalidRequest,
    MessageTooLarge,
    PermissionDenied,
    SluiceError,
    UnknownModel,
)
from sluice.openai.fields import BadField
from sluice.startup import is_loopback
from sluice.wire.subjects import BULK_CLASS

FAIL_S: Final = 5.0
"""How long a client that does not read may delay the last event of its stream, in seconds."""
ABORT: Final = "sluice.abort"
"""Key of the scope: a function that closes the connection at once, whatever has not been sent."""
AUTHENTICATED: Final = "sluice.authenticated"
"""Key of the scope of the first calls of an encrypted connection: a function to call when the caller is known."""
CERTIFICATE_NAMES: Final = "sluice.certificate_names"
"""Key of the scope: subject alternative names of the client's certificate, if it has shown one."""
PROBE: Final = "sluice.probe"
"""Key of the scope: what a stream may have between two of its events."""
CONTENT_TYPE_CHARS_MAX: Final = 1024
"""Longest content type, in characters: its parameters are parsed in quadratic time."""
_JSON: Final = "application/json"
PING: Final = b": waiting\n\n"
"""A comment for a stream that has nothing to send: clients drop it, load balancers count it as traffic."""
SSE: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class BodyTooSlow(SluiceError):
    """The body did not arrive in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "BODY_TOO_SLOW"


class HttpCall(Call, Request):
    """A call over HTTP: a request of starlette's, and the answer to it.

    Attributes:
        request_id: The id of its answer: that of the request to a model, if there is one.
        metadata: Its headers, as `metadata_of` returns them.
        api: The API that it speaks.
        remaining_s: Time until its deadline, in seconds; None without a deadline.
        keep: Counts bytes of its body that are kept; raises Overloaded.
        sent: The headers that have been sent; None before that.
        limit_headers: Returns the headers about the limits of its tenant.
        named: Returns the name that its API has for the field at a path of the proto, for errors.
        failing: Returns the event that ends its stream with an error, of the error's body.
        is_read: Whether it has become a request to a model; from then on `Endpoint` does not count it as rejected.
    """

    remaining_s: float | None = None
    keep: Callable[[int], None]

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        max_body_bytes: int,
        arrivals: Arrivals,
    ) -> None:
        """Take over the request of an ASGI application; its body may have `max_body_bytes`."""
        Request.__init__(self, scope, receive, send)
        self.request_id = new_request_id()
        self.metadata: Mapping[str, str] = metadata_of(self.headers.items())
        self.api = api_of(scope["path"], self.metadata)
        self.route = str(scope["path"])
        self.sent: Mapping[str, str] | None = None
        self.limit_headers: Callable[[], Mapping[str, str]] = dict
        self.named = self.api.named
        self.failing = self.api.event
        self.is_read = False
        self._max_body_bytes = max_body_bytes
        self._arrivals = arrivals
        self._respond = send
        self._written_at = 0.0
        self._ping: asyncio.Future[None] | None = None

    def __str__(self) -> str:
        """Return the id that the client knows the call by."""
        return self.request_id

    @property
    @override
    def certificate_names(self) -> Sequence[str]:
        names: Sequence[str] = self.scope.get(CERTIFICATE_NAMES, ())
        return names

    @property
    def caller(self) -> Caller:
        """Who calls; the connection hears when that is known."""
        return self._caller

    @caller.setter
    def caller(self, caller: Caller) -> None:
        self._caller = caller
        self.scope.get(AUTHENTICATED, lambda: None)()

    async def object(self) -> dict[str, Any]:
        """Return the body, a JSON object.

        Raises:
            InvalidRequest, EncodingUnsupported, MessageTooLarge, BodyTooSlow, ClientDisconnect: There is none.
            Overloaded: The calls of its tenant keep too many bytes.
        """
        # Browsers send other types to other origins unasked; see docs/use/http.md.
        kind = self.metadata.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _JSON:
            raise InvalidRequest.of("content-type", f"must be {_JSON}")
        encoding = encoding_of(self.metadata)
        length = self.metadata.get("content-length", "")
        # A declared length above the limit is refused before anything of the body is read.
        if length.isdecimal() and float(length) > self._max_body_bytes:
            raise self._too_large(length)
        body = bytearray()
        try:
            async with asyncio.timeout(self._arrivals.receive_s):
                async for piece in self.stream():
                    self.keep(len(piece))
                    body += piece
                    if len(body) > self._max_body_bytes:
                        raise self._too_large(f"more than {self._max_body_bytes}")
        except TimeoutError:
            raise self._too_slow() from None
        tenant, sent = self.caller.tenant, bytes(body)
        if encoding:
            gunzipped = partial(gunzip, limit=self._max_body_bytes)
            sent = await self._arrivals.parse(tenant, self._max_body_bytes, gunzipped, sent)
            self.keep(len(sent))
        return await self._arrivals.parse(tenant, len(sent), parse_json, sent)

    def pieces(self) -> AsyncIterator[bytes]:
        """Return a body of any length as an iterator of pieces.

        Raises:
            EncodingUnsupported: It is compressed.
            BodyTooSlow, ClientDisconnect: It does not go on.
        """
        if encoding_of(self.metadata):
            raise EncodingUnsupported.of(
                CONTENT_ENCODING, "gzip is served for JSON alone; send the file without it"
            )
        return self._arrivals.pieces(self.stream(), self._too_slow)

    async def write(
        self, data: bytes, headers: Mapping[str, str] = {}, status: int = 200, *, more: bool = False
    ) -> None:
        """Send an answer, or its next part; block while the client does not read.

        Args:
            data: The part.
            headers: Headers, sent before the first part; without a content type it is JSON.
            status: The HTTP status.
            more: Whether another part follows.
        """
        # A ping that is being written is not split by a part of the answer.
        if self._ping is not None:
            await self._ping
        await self._write(data, headers, status, more)

    async def _write(
        self, data: bytes, headers: Mapping[str, str], status: int, more: bool
    ) -> None:
        self._written_at = time.monotonic()
        if self.sent is None:
            length = {} if more else {"content-length": str(len(data))}
            own = dict.fromkeys(self.api.id_headers, self.request_id) | {"content-type": _JSON}
            self.sent = {**own, **self.limit_headers(), **headers, **length}
            if self.sent["content-type"] == SSE["content-type"]:
                self.scope[PROBE] = PING
            raw = Headers(self.sent).raw
            await self._respond({"type": "http.response.start", "status": status, "headers": raw})
        await self._respond({"type": "http.response.body", "body": data, "more_body": more})

    @override
    async def fail(self, error: SluiceError) -> None:
        """End the answer with `error`: as its status, as an event of its stream, or by closing the connection."""
        self._arrivals.on_error(error)
        status, headers, body = self.api.error(error, self.named, self.request_id)
        # Nothing has been sent, so the error can still be the status.
        if self.sent is None:
            await self.write(encode(body), headers, status)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(FAIL_S):
                if self.sent["content-type"] == SSE["content-type"]:
                    await self.write(self.failing(body))
                    return
        # A client that gets no event must not take what it has for complete.
        self.scope.get(ABORT, lambda: None)()
        await asyncio.sleep(0)  # the server hears of it

    @contextmanager
    def while_connected(self) -> Iterator[None]:
        """Cancel the block when the client closes the connection. The body must have been read.

        Raises:
            ClientDisconnect: The client closed it.
        """
        task, is_gone = asyncio.current_task(), False
        assert task is not None

        async def watch() -> None:
            nonlocal is_gone
            while (await self.receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            task.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            yield
        except asyncio.CancelledError:
            # Another cancellation of the task, such as a shutdown, takes precedence.
            if is_gone and task.uncancel() == 0:
                raise ClientDisconnect from None
            raise
        finally:
            watching.cancel()

    @contextmanager
    def pinged(self, every_s: float, headers: Callable[[], Mapping[str, str]]) -> Iterator[None]:
        """Send a `PING` whenever the stream has sent nothing for a while.

        Args:
            every_s: How long, in seconds.
            headers: Returns the headers of the answer, which are sent with the first ping.
        """
        loop, self._written_at = asyncio.get_running_loop(), time.monotonic()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            wait_s = self._written_at + every_s - time.monotonic()
            if wait_s <= 0 and (self._ping is None or self._ping.done()):
                self._ping = asyncio.ensure_future(self._write(PING, headers(), 200, True))
            timer = loop.call_later(wait_s if wait_s > 0 else every_s, check)

        timer = loop.call_later(every_s, check)
        try:
            yield
        finally:
            timer.cancel()

    def _too_large(self, size: str) -> MessageTooLarge:
        return MessageTooLarge(
            f"the body has {size} bytes, the limit is {self._max_body_bytes}",
            metadata={"limit_bytes": str(self._max_body_bytes)},
        )

    def _too_slow(self) -> BodyTooSlow:
        return BodyTooSlow(f"the body did not arrive within {self._arrivals.receive_s:g} s")


Behaviour = Callable[[HttpCall], Awaitable[Mapping[str, Any] | None]]
"""Returns the answer of a URL as JSON, or None if it has written one; may raise SluiceError, BadField or starlette's
ClientDisconnect."""


@dataclass(frozen=True)
class Endpoint:
    """A route as an ASGI application.

    Attributes:
        arrivals: What all calls pass.
        limit_headers: Returns the headers about the limits of a caller.
        max_body_bytes: The largest body that is read.
        hosts: Names in the header "host" that are served beside those of this machine; None for all. A web page can
            give its own name the address of this machine, and then call us like its own server; a browser sends that
            name.
        behaviour: Answers a call.
        roles: Who may call it.
        calls_models: Whether it calls models, in a class.
    """

    arrivals: Arrivals
    limit_headers: Callable[[Caller], Mapping[str, str]]
    max_body_bytes: int
    hosts: frozenset[str] | None
    behaviour: Behaviour
    roles: frozenset[str]
    calls_models: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        call = HttpCall(scope, receive, send, self.max_body_bytes, self.arrivals)
        await fail_with(self._answer(call), call.fail, call)

    async def _answer(self, call: HttpCall) -> None:
        self._check_headers(call.metadata)
        arrivals = self.arrivals
        await arrivals.arrive(call, self.roles, call.route)
        caller = call.caller
        call.limit_headers = partial(self.limit_headers, caller)
        with suppress(ClientDisconnect), arrivals.bytes.hold(caller.tenant, 0) as call.keep:
            priority_class = class_of(call.metadata) if self.calls_models else UNSTATED_CLASS
            if priority_class == BULK_CLASS:
                await arrivals.limiter.pacer.wait()
            with arrivals.limiter.running(priority_class, caller.tenant):
                answer = await self._call_behaviour(call)
                if answer is not None:
                    body, answer = encode(answer), None  # of a list much less than its objects
                    await call.write(body)

    async def _call_behaviour(self, call: HttpCall) -> Mapping[str, Any] | None:
        """Return the answer of the route; count a call that is rejected before it is a request of a model."""
        try:
            return await self.behaviour(call)
        except (BadField, InvalidRequest, MessageTooLarge, UnknownModel) as error:
            if self.calls_models and not call.is_read:
                self.arrivals.on_rejected(call.caller)
            if not isinstance(error, BadField):
                raise
            field, _, description = str(error).partition(": ")
            raise InvalidRequest.of(field, description) from None

    def serves(self, host: str) -> bool:
        """Return whether `host`, of the header "host", is a name of this gateway."""
        return self.hosts is None or host in self.hosts or is_loopback(host)

    def _check_headers(self, headers: Mapping[str, str]) -> None:
        """Refuse what web pages of others may send; raise InvalidRequest or PermissionDenied."""
        if len(headers.get("content-type", "")) > CONTENT_TYPE_CHARS_MAX:
            raise InvalidRequest.of(
                "content-type", f"is too long; send at most {CONTENT_TYPE_CHARS_MAX} characters"
            )
        host = host_of(headers)
        if not self.serves(host):
            raise PermissionDenied(
                f"host: {host!r} is not served while the gateway asks for no credentials; add it to "
                "http.hosts, or use an address of this machine"
            )
        if headers.get("host") and not host:
            raise InvalidRequest.of("host", "is not a name or an address; send HOST or HOST:PORT")
        if AUTHORIZATION not in headers and is_foreign_page(headers):
            raise PermissionDenied(
                "origin: a web page of another origin may not call the gateway; behind a proxy keep the header "
                "'host' as the browser sent it"
            )
