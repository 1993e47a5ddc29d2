"""Parses and counts the requests of our services, and turns errors into ``google.rpc.Status``.

Every method is a stream to gRPC, so that nothing of a message is received before this module reads it: first the caller
is authenticated, then its tenant has a place to send in, then the message is read and parsed, then the call passes the
limits of its class and tenant. Health alone is for everybody, so many calls of an address. grpc answers INTERNAL to a
request that it cannot parse; here it becomes an error of ours.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.descriptor_pool import Default as default_pool
from google.protobuf.message import Message

from gateway.admission import arriving
from gateway.admission.arriving import Arriving
from gateway.admission.class_limiter import ClassLimiter
from gateway.api.metadata import host_of, metadata_of
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import MESH, Caller, roles_for, set_caller
from gateway.validation.requests import class_of
from sluice.errors import (
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    SluiceError,
)
from sluice.v1.inference_pb2 import GenerateRequest
from sluice.wire.codec import request_reader

_log = logging.getLogger(__name__)

_OURS: Final = "/sluice."
_OPERATORS: Final = frozenset(
    f"/sluice.v1.AdminService/{name}"
    for name in ("ListRequests", "ListTenants", "CancelRequests", "DrainWorker", "ReadMetrics")
)
"""Needed most when the limits are reached."""
_OPEN: Final = "/grpc.health.v1.Health/"
_MESH_ONLY: Final = frozenset({MESH})
ABORT_S: Final = 5.0
HEALTH_BYTES_MAX: Final = 1024
METHODS_MAX: Final = 256
"""Methods whose handlers are kept."""

Behaviour = Callable[[Any, Any], Awaitable[Any]]
Read = Callable[[bytes], Message | SluiceError]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates all calls; reads, parses and counts requests of ``sluice.*``, and turns errors into statuses.

    Attributes:
        max_bytes: the largest message that can be taken.
    """

    def __init__(
        self,
        max_message_bytes: int,
        limiter: ClassLimiter,
        authenticator: Authenticator,
        arriving: Arriving,
        audio_max_bytes: int = 0,
    ) -> None:
        """``audio_max_bytes``: what a message may have in addition, if that is audio."""
        self._max_message_bytes = max_message_bytes
        self.max_bytes = max_message_bytes + audio_max_bytes
        self._limiter = limiter
        self._authenticator = authenticator
        self._arriving = arriving
        self._handlers: dict[str, Any] = {}
        """By method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the method that is called."""
        self._limiter.turns.arrived()
        method = str(handler_call_details.method)
        known = self._handlers.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if method.startswith(_OPEN):
            made = self._opened(handler)
        elif handler.request_streaming or not method.startswith(_OURS):
            made = self._streamed(method, handler)
        else:
            made = self._parsed(method, handler)
        if len(self._handlers) < METHODS_MAX:  # callers choose names, reflection takes any
            self._handlers[method] = made
        return made

    async def _admit(self, context: Any, method: str, roles: frozenset[str]) -> Caller:
        """The caller, `current_caller` from now on in this task; raises as `Authenticator.caller_of`."""
        names = _certificate_names(context) if self._authenticator.takes_certificates else ()
        caller = await self._authenticator.caller_of(metadata_of(context), names)
        caller.require(roles, method.removeprefix("/"))
        set_caller(caller)
        return caller

    def _opened(self, handler: Any) -> Any:
        """Of health, which anybody may ask: what a tenant is to other calls is an address here."""
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        read = request_reader(handler.request_deserializer)

        async def answer(context: Any) -> None:
            address = f"of {host_of(context.peer())}"
            with self._arriving.health(address):
                payload = await self._arriving.receive(address, context.read)
                if payload is grpc.aio.EOF:
                    raise InvalidRequest("the call ended without a message")
                if len(payload) > HEALTH_BYTES_MAX:
                    raise _too_large(len(payload), HEALTH_BYTES_MAX)
                request = read(payload)
                if isinstance(request, SluiceError):
                    raise request
                response = await behaviour(request, context)
                if not handler.response_streaming:
                    await context.write(response)

        async def guarded(_: Any, context: Any) -> None:
            try:
                await answer(context)
            except SluiceError as error:
                await abort(context, error.with_traceback(None))

        return grpc.stream_stream_rpc_method_handler(guarded, None, handler.response_serializer)

    def _streamed(self, method: str, handler: Any) -> Any:
        """Of a method with many requests, which parses and counts them itself: items, jobs, reflection."""
        assert handler.stream_stream is not None, "others are ours"
        behaviour, roles = handler.stream_stream, roles_for(method)
        generates, sends = inspect.isasyncgenfunction(behaviour), _sends_many(method)

        async def answer(requests: Any, context: Any, caller: Caller) -> None:
            taken = self._one(requests, caller.tenant) if not sends else requests
            if sends and roles != _MESH_ONLY and method.startswith(_OURS):
                taken = _pieces(requests)
            if not generates:
                await behaviour(taken, context)
                return
            async for response in behaviour(taken, context):
                await context.write(response)

        async def guarded(requests: Any, context: Any) -> None:
            try:
                caller = await self._admit(context, method, roles)
                if roles == _MESH_ONLY:
                    await answer(requests, context, caller)
                    return
                with self._arriving.stream(caller.tenant, sends=sends):
                    await answer(requests, context, caller)
            except SluiceError as error:
                await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(
            guarded, handler.request_deserializer, handler.response_serializer
        )

    async def _one(self, requests: Any, tenant: str) -> AsyncIterator[Any]:
        """The only message of a call; what comes behind it is not read."""
        message = await self._arriving.receive(tenant, partial(anext, aiter(requests), None))
        if message is not None:
            yield message

    def _parsed(self, method: str, handler: Any) -> Any:
        """Of a method with one request."""
        streams, roles = handler.response_streaming, roles_for(method)
        behaviour = handler.unary_stream if streams else handler.unary_unary
        read = self._reader(handler.request_deserializer)
        limiter = None if method in _OPERATORS else self._limiter

        async def answer(request: Any, context: Any) -> None:
            response = await behaviour(request, context)
            if not streams:
                await context.write(response)

        async def call(context: Any) -> None:
            tenant = (await self._admit(context, method, roles)).tenant
            payload = await self._arriving.receive(tenant, context.read)
            if payload is grpc.aio.EOF:
                raise InvalidRequest("the call ended without a message")
            with self._arriving.kept_by(tenant) as kept:
                kept.add(len(payload))
                request = read(payload)
                del payload
                if isinstance(request, SluiceError):
                    raise request
                if limiter is None:
                    await answer(request, context)
                    return
                priority_class = class_of(request)
                await limiter.turn(priority_class)
                with limiter.call(priority_class, tenant):
                    await answer(request, context)

        async def guarded(_: Any, context: Any) -> None:
            try:
                await call(context)
            except SluiceError as error:
                # Without its frames, which have the request: a client that does not read would keep it in memory.
                await abort(context, error.with_traceback(None))
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception:  # grpc would show the text of the exception to the caller
                _log.exception("a call failed")
                await abort(context, InternalError("the gateway failed; its log has the reason"))

        return grpc.stream_stream_rpc_method_handler(guarded, None, handler.response_serializer)

    def _reader(self, parse: Callable[[bytes], Message]) -> Read:
        parsed = request_reader(parse)

        def read(payload: bytes) -> Message | SluiceError:
            limit = self._max_message_bytes
            if len(payload) > self.max_bytes:
                return _too_large(len(payload), self.max_bytes)
            message = parsed(payload)
            if isinstance(message, SluiceError):
                return message
            if len(payload) > limit and len(payload) - _audio_bytes(message) > limit:
                return _too_large(len(payload), limit)
            return message

        return read


async def _pieces(requests: Any) -> AsyncIterator[Any]:
    """The messages of an upload, each within the time of a message."""
    messages = aiter(requests)
    while True:
        try:
            async with asyncio.timeout(arriving.RECEIVE_S):
                message = await anext(messages, None)
        except TimeoutError:
            raise DeadlinePassed(
                f"the next piece did not arrive within {arriving.RECEIVE_S:g} s: send the file again"
            ) from None
        if message is None:
            return
        yield message


def _sends_many(method: str) -> bool:
    """Whether the client of ``method``, "/package.Service/Method", may send more than one message."""
    if not method.startswith(_OURS):
        return True
    try:
        found = default_pool().FindMethodByName(method.removeprefix("/").replace("/", "."))
    except KeyError:
        return False
    return bool(found.client_streaming)


async def abort(context: Any, error: SluiceError) -> None:
    """Ends the call of ``context`` with ``error``; always raises.

    For a client that does not read, gRPC keeps the status: after `ABORT_S` the rest of the call is released.
    """
    try:
        async with asyncio.timeout(ABORT_S):
            await context.abort(*error.as_abort())
    except TimeoutError:
        raise asyncio.CancelledError from None


def _certificate_names(context: Any) -> list[str]:
    """Subject alternative names of the client's certificate, which TLS has verified."""
    names = (context.auth_context() or {}).get("x509_subject_alternative_name", ())
    return [name.decode(errors="replace") for name in names]


def _audio_bytes(message: Message) -> int:
    return len(message.audio.data) if isinstance(message, GenerateRequest) else 0


def _too_large(size: int, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"the request has {size} bytes, the limit is {limit}",
        metadata={"bytes": str(size), "limit_bytes": str(limit)},
    )
