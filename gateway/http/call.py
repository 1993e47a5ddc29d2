"""One HTTP call: its body within its limits, its answer, and the end of its work when the client has gone.

`Endpoint` is what every route passes: the limits of class and tenant, as gRPC's interceptor has them, and errors.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from gateway.admission.arriving import Arriving, Held
from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.tenant_limits import TenantLimits
from gateway.api.generate import new_request_id
from gateway.http.answers import encode, error_answer, sse
from gateway.http.headers import headers_of, host_of, is_foreign_page
from gateway.http.requests import field_name, parse_json
from gateway.identity.authenticator import AUTHORIZATION, Authenticator
from gateway.identity.caller import set_caller
from sluice.errors import (
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    PermissionDenied,
    SluiceError,
)
from sluice.openai.errors import error_body
from sluice.startup import is_loopback

_log = logging.getLogger(__name__)

BODY_S: Final = 30.0
"""How long a client may take to send its body, seconds."""
FAIL_S: Final = 5.0
"""How long a client that does not read may keep the last event of its stream, seconds."""
ABORT: Final = "sluice.abort"
"""In the scope: closes the connection at once, whatever has not been sent."""
CERTIFICATE_NAMES: Final = "sluice.certificate_names"
"""In the scope: subject alternative names of the client's certificate, if it has shown one."""
_JSON: Final = "application/json"
SSE: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


class BodyTooSlow(Exception):
    """The body did not arrive in time."""


class HttpCall:
    """One call.

    Attributes:
        request_id: of its answer, where nothing that it asked for has one.
        headers: names in lower case.
        path: the parameters of its path.
        query: those behind the "?"; of one that comes twice the last.
        sent: the headers that have been sent; None: none yet.
        limit_headers: what its answer says of the limits of its tenant.
        named: what the API of the call calls the field at a path of the proto; of errors.
        failing: the event that ends its stream with an error, by the body of the error.
        keep: called with the bytes of each piece of the body that is kept; raises Overloaded where they are too many.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.request_id = new_request_id()
        self.headers: Mapping[str, str] = headers_of(scope["headers"])
        self.path: Mapping[str, str] = scope.get("path_params", {})
        self.query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        self.sent: Mapping[str, str] | None = None
        self.limit_headers: Callable[[], Mapping[str, str]] = dict
        self.named: Callable[[str], str] = field_name
        self.failing: Callable[[Mapping[str, Any]], bytes] = sse
        self.keep: Callable[[int], None] = lambda _: None
        self._abort: Callable[[], None] = scope.get(ABORT, lambda: None)
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes

    async def json(self) -> dict[str, Any]:
        """The body, a JSON object.

        Raises:
            InvalidRequest, MessageTooLarge, BodyTooSlow, ClientGone: there is none.
        """
        # Browsers send other types to other origins unasked; see docs/use/http.md.
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _JSON:
            raise InvalidRequest.of("content-type", f"must be {_JSON}")
        return parse_json(await self._body())

    async def pieces(self) -> AsyncIterator[bytes]:
        """A body of any length, piece by piece.

        Raises:
            BodyTooSlow, ClientGone: it does not go on.
        """
        more = True
        while more:
            try:
                async with asyncio.timeout(BODY_S):
                    message = await self._receive()
            except TimeoutError:
                raise BodyTooSlow from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message["more_body"]
            yield message["body"]

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        """Sends a whole answer; of JSON where ``headers`` name no other type."""
        length = {"content-length": str(len(body))}
        await self._start(status, {"content-type": _JSON, **headers, **length})
        await self._send({"type": "http.response.body", "body": body})

    async def write(self, data: bytes, headers: Mapping[str, str]) -> None:
        """Sends a part of the answer, ``headers`` before the first; blocks while the client does not read."""
        if self.sent is None:
            await self._start(200, headers)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes, headers: Mapping[str, str]) -> None:
        """Sends the last part."""
        if self.sent is None:
            await self._start(200, headers)
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, error: SluiceError) -> None:
        """Ends the answer with ``error``: as its status; as an event of a stream; else by cutting the connection."""
        status, headers, body = error_answer(error, self.named)
        if self.sent is None:
            await self.answer(status, encode(body), headers)
            return
        try:
            async with asyncio.timeout(FAIL_S):
                if self.sent["content-type"] == SSE["content-type"]:
                    await self.end(self.failing(body), {})
                    return
        except TimeoutError:
            pass
        self._abort()
        await asyncio.sleep(0)  # the server hears of it

    @contextmanager
    def while_connected(self) -> Iterator[None]:
        """Cancels the block when the client closes the connection. The body must have been read.

        Raises:
            ClientGone: it has.
        """
        task, gone = asyncio.current_task(), False
        assert task is not None

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            yield
        except asyncio.CancelledError:
            if gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watching.cancel()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        headers = {"x-request-id": self.request_id, **self.limit_headers(), **headers}
        self.sent = headers
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self) -> bytes:
        length = self.headers.get("content-length", "")
        if length.isdecimal() and float(length) > self._max_body_bytes:
            raise self._too_large(length)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in self.pieces():
                    self.keep(len(piece))
                    body += piece
                    if len(body) > self._max_body_bytes:
                        raise self._too_large(f"more than {self._max_body_bytes}")
        except TimeoutError:
            raise BodyTooSlow from None
        return bytes(body)

    def _too_large(self, size: str) -> MessageTooLarge:
        return MessageTooLarge(
            f"the body has {size} bytes, the limit is {self._max_body_bytes}",
            metadata={"limit_bytes": str(self._max_body_bytes)},
        )


Behaviour = Callable[[HttpCall], Awaitable[None]]


@dataclass(frozen=True)
class CallChecks:
    """What every call passes before other work is done for it.

    Attributes:
        local_only: the header "host" must name this machine. A web page can give its own name the address of this
            machine, and then ask us like its own server; a browser sends that name.
    """

    authenticator: Authenticator
    limiter: ClassLimiter
    arriving: Arriving
    limits: TenantLimits
    max_body_bytes: int
    local_only: bool


@dataclass(frozen=True)
class Endpoint:
    """A route as an ASGI application.

    Attributes:
        roles: who may call it.
        class_of: the class of a call by its headers, for the limits that come before all other work.
    """

    checks: CallChecks
    behaviour: Behaviour
    roles: frozenset[str]
    class_of: Callable[[Mapping[str, str]], str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one call."""
        checks = self.checks
        limiter = checks.limiter
        call = HttpCall(scope, receive, send, checks.max_body_bytes)
        limiter.turns.arrived()
        held: Held | None = None
        with suppress(ClientGone):
            try:
                if checks.local_only and not is_loopback(host_of(call.headers)):
                    raise PermissionDenied(
                        "host: must be an address of this machine while the gateway asks for no credentials; behind a "
                        "proxy set gateway.allow_remote"
                    )
                if AUTHORIZATION not in call.headers and is_foreign_page(call.headers):
                    raise PermissionDenied(
                        "origin: a web page of another origin may not call the gateway; behind a proxy keep the header "
                        "'host' as the browser sent it"
                    )
                names = scope.get(CERTIFICATE_NAMES, ())
                caller = await checks.authenticator.caller_of(call.headers, names)
                caller.require(self.roles, scope["path"])
                set_caller(caller)
                call.limit_headers = partial(checks.limits.headers, caller)
                held = checks.arriving.kept_by(caller.tenant)
                call.keep = held.add
                priority_class = self.class_of(call.headers)
                await limiter.turn(priority_class)
                with limiter.call(priority_class, caller.tenant):
                    await self.behaviour(call)
            except SluiceError as error:
                # Without its frames, which have the body: a client that does not read would keep it in memory.
                await call.fail(error.with_traceback(None))
            except BodyTooSlow:
                message = f"the body did not arrive within {BODY_S:g} s"
                await call.answer(408, encode(error_body(408, "BODY_TOO_SLOW", message)))
            except ClientGone:
                raise
            except Exception:  # the text of an exception is not for the caller
                _log.exception("the call %s failed", call.request_id)
                await call.fail(InternalError("the gateway failed; its log has the reason"))
            finally:
                if held is not None:
                    held.release()
