"""Parses and counts the requests of our services, and turns errors into ``google.rpc.Status``.

Every method is a stream to gRPC, so that nothing of a message is received before this module reads it: first the caller
is authenticated, then its tenant has a place to send in, then the message is read and parsed, then the call passes the
limits of its class and tenant. Health alone is for everybody, so many calls of an address. grpc answers INTERNAL to a
request that it cannot parse; here it becomes an error of ours.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor_pool import Default as default_pool
from google.protobuf.message import Message
from grpc import stream_stream_rpc_method_handler as stream_stream
from grpc import stream_unary_rpc_method_handler as stream_unary

from gateway.admission import calls
from gateway.admission.calls import CallChecks, guarded
from gateway.identity.caller import ASKS, MESH, Caller, methods_of, roles_for
from gateway.validation.requests import class_of
from sluice.errors import DeadlinePassed, InvalidRequest, MessageTooLarge, SluiceError
from sluice.startup import is_loopback
from sluice.v1.inference_pb2 import GenerateRequest
from sluice.wire.codec import request_reader
from sluice.wire.subjects import BULK_CLASS

_OURS: Final = "/sluice."
_OPERATORS: Final = methods_of(
    "AdminService", "ListRequests ListTenants CancelRequests DrainWorker ReadMetrics"
)
"""Needed most when the limits are reached."""
_OPEN: Final = "/grpc.health.v1.Health/"
_MESH_ONLY: Final = frozenset({MESH})
ABORT_S: Final = 5.0
HEALTH_BYTES_MAX: Final = 1024
METHODS_MAX: Final = 256
"""Methods whose handlers are kept."""

_F = TypeVar("_F", bound=Callable[..., Any])
Read = Callable[[bytes], Message | SluiceError]
Metadata = Sequence[tuple[str, str | bytes]]


class GrpcCall:
    """A call whose caller is known; the methods of our services get it in place of grpc's context.

    Attributes:
        metadata: its text entries; the trace context is among them.
        write, peer, abort: of grpc's context.
    """

    __slots__ = ("_remaining_s", "abort", "caller", "metadata", "peer", "write")
    route = ""

    def __init__(self, context: Any, entries: Metadata) -> None:
        """The call of ``context`` with the metadata ``entries``; ``caller`` is not known yet."""
        self.caller: Caller
        self.metadata: Mapping[str, str] = {
            key: value for key, value in entries if isinstance(value, str)
        }
        self.write: Callable[[Any], Awaitable[None]] = context.write
        self._remaining_s: Callable[[], float | None] = context.time_remaining
        self.peer: Callable[[], str] = context.peer
        self.abort: Callable[..., Awaitable[None]] = context.abort

    @property
    def remaining_s(self) -> float | None:
        """Until its deadline, seconds; None: it has none."""
        return self._remaining_s()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates all calls; reads, parses and counts requests of ``sluice.*``, and turns errors into statuses.

    Attributes:
        max_bytes: the largest message that can be taken.
    """

    def __init__(
        self, max_message_bytes: int, checks: CallChecks, audio_max_bytes: int = 0
    ) -> None:
        """``audio_max_bytes``: what a message may have in addition, if that is audio."""
        self._max_message_bytes = max_message_bytes
        self.max_bytes = max_message_bytes + audio_max_bytes
        self._checks = checks
        self._arriving = checks.arriving
        self._handlers: dict[str, Callable[[Metadata], Any]] = {}
        """By method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the method that is called."""
        self._checks.limiter.turns.arrived_at = time.monotonic()
        method = str(handler_call_details.method)
        made = self._handlers.get(method)
        if made is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            if method.startswith(_OPEN):
                made = self._opened(handler)
            elif handler.request_streaming or not method.startswith(_OURS):
                made = self._streamed(method, handler)
            else:
                made = self._unary(method, handler)
            if len(self._handlers) < METHODS_MAX:  # callers choose names, reflection takes any
                self._handlers[method] = made
        # The context of the call would make the metadata once more.
        return made(handler_call_details.invocation_metadata or ())

    async def _call(
        self, context: Any, entries: Metadata, method: str, roles: frozenset[str]
    ) -> GrpcCall:
        """The call of ``context``; raises as `Authenticator.caller_of`, and PermissionDenied."""
        call, checks = GrpcCall(context, entries), self._checks
        names = _certificate_names(context) if checks.authenticator.takes_certificates else ()
        call.caller = await checks.authenticator.caller_of(call.metadata, names)
        call.caller.require(roles, method.removeprefix("/"))
        return call

    def _opened(self, handler: Any) -> Any:
        """Of health, which anybody may ask: what a tenant is to other calls is an address here."""
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        read = request_reader(handler.request_deserializer)

        async def asked(context: Any) -> Message:
            payload = await context.read()
            if payload is not grpc.aio.EOF and len(payload) > HEALTH_BYTES_MAX:
                raise _too_large(len(payload), HEALTH_BYTES_MAX)
            return _parsed(payload, read)

        async def answer(_: Any, context: Any, __: Metadata) -> None:
            address = host_of(context.peer())
            with self._arriving.brief(address):
                request = await asked(context)
                if not handler.response_streaming:
                    await context.write(await behaviour(request, context))
                    return
            with self._arriving.watching.held(address):
                await behaviour(request, context)

        return _guarded(_OPEN, answer, None, handler.response_serializer, self._checks.refused)

    def _streamed(self, method: str, handler: Any) -> Any:
        """Of a method with many requests, which parses and counts them itself: items, jobs, reflection."""
        assert handler.stream_stream is not None, "others are ours"
        behaviour, roles = handler.stream_stream, roles_for(method)
        sends = _sends_many(method)

        async def behave(requests: Any, call: GrpcCall) -> None:
            taken = self._one(requests, call.caller.tenant) if not sends else requests
            if sends and roles != _MESH_ONLY and method.startswith(_OURS):
                taken = calls.in_time(aiter(requests), _late_piece)
            await behaviour(taken, call)

        async def answer(requests: Any, context: Any, entries: Metadata) -> None:
            call = await self._call(context, entries, method, roles)
            if roles == _MESH_ONLY:
                await behave(requests, call)
                return
            tenant, arriving = call.caller.tenant, self._arriving
            await arriving.turns.take(tenant)
            uploads = arriving.uploads.held(tenant) if sends else nullcontext()
            with arriving.streams.held(tenant), uploads:
                await behave(requests, call)

        read, write = handler.request_deserializer, handler.response_serializer
        return _guarded(method, answer, read, write, self._checks.refused)

    async def _one(self, requests: Any, tenant: str) -> AsyncIterator[Any]:
        """The only message of a call; what comes behind it is not read."""
        message = await self._arriving.receive(tenant, partial(anext, aiter(requests), None))
        if message is not None:
            yield message

    def _unary(self, method: str, handler: Any) -> Any:
        """Of a method with one request."""
        streams, roles = handler.response_streaming, roles_for(method)
        behaviour = handler.unary_stream if streams else handler.unary_unary
        read, limiter = request_reader(handler.request_deserializer), self._checks.limiter

        async def behave(request: Any, call: GrpcCall) -> Any:
            response = await behaviour(request, call)
            if streams:
                return response
            await call.write(response)
            return None

        async def answer(_: Any, context: Any, entries: Metadata) -> Any:
            call = await self._call(context, entries, method, roles)
            tenant = call.caller.tenant
            await self._arriving.turns.take(tenant)
            payload = await self._arriving.receive(tenant, context.read)
            size = 0 if payload is grpc.aio.EOF else len(payload)
            self._arriving.bytes.take(tenant, size)
            try:
                make = partial(self._read, payload, size, read)
                try:
                    request = await self._arriving.parse(tenant, size, make)
                except (InvalidRequest, MessageTooLarge):
                    if roles == ASKS:
                        self._checks.count_refused(call.caller)
                    raise
                del payload, make  # they may be large
                if method in _OPERATORS:
                    return await behave(request, call)
                priority_class = class_of(request)
                if priority_class == BULK_CLASS:
                    await limiter.turns.turn()
                with limiter.call(priority_class, tenant):
                    return await behave(request, call)
            finally:
                self._arriving.bytes.give(tenant, size)

        make = stream_unary if hasattr(behaviour, "returns_last") else stream_stream
        write = handler.response_serializer
        return _guarded(method, answer, None, write, self._checks.refused, make)

    def _read(self, payload: Any, size: int, read: Read) -> Message:
        """The message of a call; raises what is wrong with it."""
        if size > self.max_bytes:
            raise _too_large(size, self.max_bytes)
        message, limit = _parsed(payload, read), self._max_message_bytes
        if size > limit:
            audio = len(message.audio.data) if isinstance(message, GenerateRequest) else 0
            if size - audio > limit:
                raise _too_large(size, limit)
        return message


def returns_last(method: _F) -> _F:
    """Marks a method that writes a stream but for its last message, a small one, and returns that.

    gRPC sends it with the status: a write, and a wake-up of the loop, less for each call.
    """
    method.returns_last = True  # type: ignore[attr-defined]
    return method


def _parsed(payload: Any, read: Read) -> Message:
    if payload is grpc.aio.EOF:
        raise InvalidRequest("the call ended without a message")
    message = read(payload)
    if isinstance(message, SluiceError):
        raise message
    return message


def _guarded(
    method: str,
    answer: Callable[[Any, Any, Metadata], Awaitable[Any]],
    read: Any,
    write: Any,
    refused: Callable[[SluiceError], None],
    make: Callable[..., Any] = stream_stream,
) -> Callable[[Metadata], Any]:
    """What makes the handler of a call. To gRPC every method is a stream of messages in both directions."""

    def handler(entries: Metadata) -> Any:
        async def handle(requests: Any, context: Any) -> Any:
            async def fail(error: SluiceError) -> None:
                refused(error)
                await abort(context, error)

            return await guarded(answer(requests, context, entries), fail, method)

        return make(handle, read, write)

    return handler


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
    status = error.as_abort()
    try:
        async with asyncio.timeout(ABORT_S):
            await context.abort(*status)
    except grpc.aio.AbortError:
        raise
    except Exception:  # nobody reads, or the client has left at its own deadline: gRPC cannot send the status any more
        raise asyncio.CancelledError from None


def host_of(peer: str) -> str:
    """The address of the caller; ``peer`` as gRPC names it, "ipv4:HOST:PORT"."""
    kind, _, address = unquote(peer).partition(":")
    return kind if kind == "unix" else address.rpartition(":")[0].strip("[]")


def is_local(peer: str) -> bool:
    """Whether the caller runs on this machine; ``peer`` as in `host_of`."""
    host = host_of(peer)
    return host == "unix" or is_loopback(host)


def _certificate_names(context: Any) -> list[str]:
    """Subject alternative names of the client's certificate, which TLS has verified."""
    names = (context.auth_context() or {}).get("x509_subject_alternative_name", ())
    return [name.decode(errors="replace") for name in names]


def _late_piece() -> DeadlinePassed:
    return DeadlinePassed(
        f"the next piece did not arrive within {calls.RECEIVE_S:g} s: send the file again"
    )


def _too_large(size: int, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"the request has {size} bytes, the limit is {limit}",
        metadata={"bytes": str(size), "limit_bytes": str(limit)},
    )
