"""Methods of our gRPC services, as the server calls them: from the first byte of a call to its status.

To gRPC every method takes a stream of messages, so that nothing of a message is received before
`gateway.admission.arrivals` allows it. `CallInterceptor` chooses what serves a call; each class serves one shape of
method:

- `UnaryMethod`: one request; the answer is one message or a stream.
- `StreamMethod`: a stream of requests, which the method counts itself: items, all methods about jobs, reflection.
- `HealthMethod`: one request of anybody, without credentials.

Methods of our services get a `GrpcCall` in place of grpc's context. What they return leaves together with the status of
the call: the only message of an answer, or the last one of Generate.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor_pool import Default as default_pool
from typing_extensions import override

from gateway.admission.arrivals import MESH_ONLY, Arrivals
from gateway.admission.request_context import Call, fail_with
from gateway.identity.caller import CALLERS, methods_of, roles_for
from gateway.validation.requests import class_of
from sluice.errors import DeadlinePassed, InvalidRequest, MessageTooLarge, SluiceError
from sluice.startup import is_loopback
from sluice.v1.inference_pb2 import GenerateRequest
from sluice.wire.codec import request_reader
from sluice.wire.subjects import BULK_CLASS

OURS: Final = "/sluice."
"""How the methods of our services begin."""
UNLIMITED: Final = methods_of(
    "AdminService", "ListRequests ListTenants CancelRequests DrainWorker ReadMetrics"
)
"""Methods without a limit by class: operators need them most when the limits are reached."""
GENERATE: Final = "/sluice.v1.InferenceService/Generate"
"""The streaming method that returns its last message."""
HEALTH: Final = "/grpc.health.v1.Health/"
"""How the methods of the health service begin."""
METHODS_MAX: Final = 256
"""Most methods whose handlers are cached: callers choose names, and `JobForwarder` serves any of its service."""
HEALTH_BYTES_MAX: Final = 1024
"""Largest request about health, in bytes: the name of a service."""


class GrpcCall(Call):
    """A call over gRPC.

    Attributes:
        read: Returns the next message, or `grpc.aio.EOF`.
    """

    def __init__(
        self,
        context: Any,
        method: str,
        on_error: Callable[[SluiceError], object],
        serialize: Callable[[Any], bytes] | None,
        abort_s: float,
    ) -> None:
        """Take over a call.

        Args:
            context: The call of grpc.
            method: The name of its method.
            on_error: Counts the error that it ends with.
            serialize: Serializes its messages; None if they are bytes.
            abort_s: See `Arrivals.abort_s`.
        """
        self._serialize = serialize
        self._context = context
        self._method = method
        self._on_error = on_error
        self._abort_s = abort_s
        self.metadata: Mapping[str, str] = {
            key: value for key, value in context.invocation_metadata() if isinstance(value, str)
        }
        self.read: Callable[[], Awaitable[Any]] = context.read

    def __str__(self) -> str:
        """Return the name of its method."""
        return self._method

    @property
    @override
    def remaining_s(self) -> float | None:
        remaining_s: float | None = self._context.time_remaining()
        return remaining_s

    @property
    @override
    def certificate_names(self) -> Sequence[str]:
        names = (self._context.auth_context() or {}).get("x509_subject_alternative_name", ())
        return [name.decode(errors="replace") for name in names]

    @property
    def peer(self) -> str:
        """The address of the client as gRPC names it, such as "ipv4:HOST:PORT"."""
        return str(self._context.peer())

    async def write(self, message: Any) -> None:
        """Send a message; block while the client does not read."""
        payload = message if self._serialize is None else self._serialize(message)
        await self._context.write(payload)

    async def abort(
        self, code: grpc.StatusCode, details: str, metadata: Sequence[Any] = ()
    ) -> None:
        """End the call with the status of another server; always raises."""
        await self._context.abort(code, details, metadata)

    @override
    async def fail(self, error: SluiceError) -> None:
        """End the call with `error`; always raises.

        For a client that does not read, gRPC keeps the status: after `abort_s` the rest of the call is released.
        """
        self._on_error(error)
        status = error.as_abort()
        try:
            async with asyncio.timeout(self._abort_s):
                await self._context.abort(*status)
        except grpc.aio.AbortError:
            raise
        except Exception:  # the client does not read, or has left at its own deadline
            raise asyncio.CancelledError from None


class Method(ABC):
    """One method of a service.

    Attributes:
        handler: What the server calls for it.
    """

    def __init__(
        self,
        name: str,
        inner: Any,
        arrivals: Arrivals,
        max_message_bytes: int = HEALTH_BYTES_MAX,
        audio_max_bytes: int = 0,
    ) -> None:
        """Serve the method `name`, "/package.Service/Method".

        Args:
            name: The full name.
            inner: The handler that was registered for it.
            arrivals: What calls pass.
            max_message_bytes: The largest request, if there is one alone.
            audio_max_bytes: How much larger it may be if that is audio.
        """
        self._max_message_bytes, self._audio_max_bytes = max_message_bytes, audio_max_bytes
        self._name = name
        self._arrivals = arrivals
        self._roles = roles_for(name)
        self._behaviour = inner.unary_unary or inner.unary_stream or inner.stream_stream
        self._is_streaming = bool(inner.response_streaming)
        self._reader = request_reader(inner.request_deserializer)
        self._serialize = inner.response_serializer
        read = inner.request_deserializer if inner.request_streaming else None
        if name == GENERATE or not self._is_streaming:
            make = grpc.stream_unary_rpc_method_handler
            self.handler = make(self._handle, read, self._serialize)
        else:
            # Messages are serialized by `GrpcCall.write`, as those before the last one of Generate are.
            self.handler = grpc.stream_stream_rpc_method_handler(self._handle, read, None)

    async def _handle(self, requests: Any, context: Any) -> Any:
        on_error, abort_s = self._arrivals.on_error, self._arrivals.abort_s
        call = GrpcCall(context, self._name, on_error, self._serialize, abort_s)
        return await fail_with(self._answer(requests, call), call.fail, call)

    @abstractmethod
    async def _answer(self, requests: Any, call: GrpcCall) -> Any:
        """Answer `call` and return the last message; `requests` are its messages, parsed if the method has many."""

    def _parse(self, payload: Any) -> Any:
        """Return the message in `payload`; raise InvalidRequest or MessageTooLarge."""
        if payload is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a message")
        size, limit = len(payload), self._max_message_bytes
        if size > limit + self._audio_max_bytes:
            raise _too_large(size, limit + self._audio_max_bytes)
        message = self._reader(payload)
        if isinstance(message, SluiceError):
            raise message
        if size > limit:
            audio = len(message.audio.data) if isinstance(message, GenerateRequest) else 0
            if size - audio > limit:
                raise _too_large(size, limit)
        return message


class UnaryMethod(Method):
    """A method with one request."""

    @override
    async def _answer(self, requests: Any, call: GrpcCall) -> Any:
        arrivals = self._arrivals
        await arrivals.arrive(call, self._roles, self._name.removeprefix("/"))
        tenant = call.caller.tenant
        payload = await arrivals.receive(tenant, call.read)
        size = 0 if payload is grpc.aio.EOF else len(payload)
        with arrivals.bytes.hold(tenant, size):
            try:
                request = await arrivals.parse(tenant, size, self._parse, payload)
            except (InvalidRequest, MessageTooLarge):
                if self._roles == CALLERS:
                    arrivals.on_rejected(call.caller)
                raise
            del payload  # it may be large
            if self._name in UNLIMITED:
                return await self._behaviour(request, call)
            priority_class = class_of(request)
            if priority_class == BULK_CLASS:
                await arrivals.limiter.pacer.wait()
            with arrivals.limiter.running(priority_class, tenant):
                answering = self._behaviour(request, call)
                del request  # it may be large, and the answer may take long
                return await answering


class StreamMethod(Method):
    """A method with many requests; calls of it have no class, and a limit of their own."""

    def __init__(self, name: str, inner: Any, arrivals: Arrivals) -> None:
        super().__init__(name, inner, arrivals)
        self._is_upload = _is_client_streaming(name)

    @override
    async def _answer(self, requests: Any, call: GrpcCall) -> Any:
        arrivals = self._arrivals
        await arrivals.arrive(call, self._roles, self._name.removeprefix("/"))
        tenant = call.caller.tenant
        if not self._is_upload:
            requests = self._only_request(requests, tenant)
        if self._roles == MESH_ONLY:  # its tenants are those of the items that it sends
            return await self._behaviour(requests, call)
        with arrivals.streams.hold(tenant):
            if not self._is_upload:
                return await self._behaviour(requests, call)
            with arrivals.uploads.hold(tenant):
                if self._name.startswith(OURS):
                    requests = arrivals.pieces(aiter(requests), self._late)
                return await self._behaviour(requests, call)

    async def _only_request(self, requests: Any, tenant: str) -> AsyncIterator[Any]:
        """Yield the only message of a call; whatever follows is not read."""
        read = partial(anext, aiter(requests), None)
        message = await self._arrivals.receive(tenant, read)
        if message is not None:
            yield message

    def _late(self) -> DeadlinePassed:
        return DeadlinePassed(
            f"the next piece did not arrive within {self._arrivals.receive_s:g} s: send the file again"
        )


class HealthMethod(Method):
    """A method of health, which anybody may call: limits by tenant are limits by address here."""

    @override
    async def _answer(self, requests: Any, call: GrpcCall) -> Any:
        address = host_of(call.peer)
        async with self._arrivals.brief(address):
            request = self._parse(await call.read())
            if not self._is_streaming:
                return await self._behaviour(request, call)
        with self._arrivals.watching.hold(address):
            return await self._behaviour(request, call)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Serves methods of our services, of health and of reflection by `Method`.

    Attributes:
        max_bytes: The largest message that can be taken.
    """

    def __init__(
        self, max_message_bytes: int, arrivals: Arrivals, audio_max_bytes: int = 0
    ) -> None:
        """Take messages of up to `max_message_bytes`, and of `audio_max_bytes` more if that is audio."""
        self._sizes = max_message_bytes, audio_max_bytes
        self.max_bytes = max_message_bytes + audio_max_bytes
        self._arrivals = arrivals
        self._methods: dict[str, Method] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of the method that is called; None if there is no such method."""
        name = str(handler_call_details.method)
        method = self._methods.get(name)
        if method is None:
            inner = await continuation(handler_call_details)
            if inner is None:
                return None
            method = self._make(name, inner)
            if len(self._methods) < METHODS_MAX:
                self._methods[name] = method
        return method.handler

    def _make(self, name: str, inner: Any) -> Method:
        if name.startswith(HEALTH):
            return HealthMethod(name, inner, self._arrivals)
        if inner.request_streaming or not name.startswith(OURS):
            return StreamMethod(name, inner, self._arrivals)
        return UnaryMethod(name, inner, self._arrivals, *self._sizes)


def _is_client_streaming(method: str) -> bool:
    """Return whether the client of `method` may send more than one message."""
    if not method.startswith(OURS):
        return True
    try:
        descriptor = default_pool().FindMethodByName(method.removeprefix("/").replace("/", "."))
    except KeyError:
        return False
    return bool(descriptor.client_streaming)


def _too_large(size: int, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"the request has {size} bytes, the limit is {limit}",
        metadata={"bytes": str(size), "limit_bytes": str(limit)},
    )


def host_of(peer: str) -> str:
    """Return the host of `peer`, an address as gRPC names it; "unix" for a Unix socket."""
    kind, _, address = unquote(peer).partition(":")
    return kind if kind == "unix" else address.rpartition(":")[0].strip("[]")


def is_local(peer: str) -> bool:
    """Return whether the client at `peer`, an address as gRPC names it, runs on this machine."""
    host = host_of(peer)
    return host == "unix" or is_loopback(host)
