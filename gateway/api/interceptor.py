"""Parses and counts the requests of our services, and turns errors into ``google.rpc.Status``.

grpc answers INTERNAL to a request that it cannot parse. So requests are parsed here, into the message or an error, and
the error is raised where errors are turned into a status. Every method is authenticated and passes the limits of its
class and tenant here, before any other work is done for it. Health alone is for everybody.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from gateway.admission.class_limiter import ClassLimiter
from gateway.api.metadata import metadata_of
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import Caller, roles_for, set_caller
from gateway.validation.requests import class_of
from sluice.errors import InternalError, MessageTooLarge, SluiceError
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
ABORT_S: Final = 5.0

Behaviour = Callable[[Any, Any], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates all calls; parses and counts requests of ``sluice.*``, and turns errors into statuses.

    Attributes:
        max_bytes: the largest message that can be taken.
    """

    def __init__(
        self,
        max_message_bytes: int,
        limiter: ClassLimiter,
        authenticator: Authenticator,
        audio_max_bytes: int = 0,
    ) -> None:
        """``audio_max_bytes``: what a message may have in addition, if that is audio."""
        self._max_message_bytes = max_message_bytes
        self.max_bytes = max_message_bytes + audio_max_bytes
        self._limiter = limiter
        self._authenticator = authenticator
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
        if handler is None or method.startswith(_OPEN):
            return handler
        if handler.request_streaming or not method.startswith(_OURS):
            made = self._handlers[method] = self._authenticated(method, handler)
            return made
        made = self._handlers[method] = self._parsed(method, handler)
        return made

    async def _admit(self, context: Any, method: str, roles: frozenset[str]) -> Caller:
        """The caller, `current_caller` from now on in this task; raises as `Authenticator.caller_of`."""
        names = _certificate_names(context) if self._authenticator.takes_certificates else ()
        caller = await self._authenticator.caller_of(metadata_of(context), names)
        caller.require(roles, method.removeprefix("/"))
        set_caller(caller)
        return caller

    def _authenticated(self, method: str, handler: Any) -> Any:
        """Of a method with many requests, which parses and counts them itself: items, jobs, reflection."""
        assert handler.stream_stream is not None, "others are ours"
        behaviour, roles = handler.stream_stream, roles_for(method)
        generates = inspect.isasyncgenfunction(behaviour)

        async def guarded(requests: Any, context: Any) -> None:
            try:
                await self._admit(context, method, roles)
            except SluiceError as error:
                await abort(context, error)
            if not generates:
                await behaviour(requests, context)
                return
            async for response in behaviour(requests, context):
                await context.write(response)

        return grpc.stream_stream_rpc_method_handler(
            guarded, handler.request_deserializer, handler.response_serializer
        )

    def _parsed(self, method: str, handler: Any) -> Any:
        streams = handler.response_streaming
        make = (
            grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        )
        behaviour = handler.unary_stream if streams else handler.unary_unary
        admit = partial(self._admit, method=method, roles=roles_for(method))
        return make(
            _guarded(behaviour, None if method in _OPERATORS else self._limiter, admit),
            request_deserializer=self._deserializer(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _deserializer(self, parse: Callable[[bytes], Message]) -> Callable[[bytes], Any]:
        read = request_reader(parse)

        def deserialize(payload: bytes) -> Message | SluiceError:
            limit = self._max_message_bytes
            if len(payload) > self.max_bytes:
                return _too_large(len(payload), self.max_bytes)
            message = read(payload)
            if isinstance(message, SluiceError):
                return message
            if len(payload) > limit and len(payload) - _audio_bytes(message) > limit:
                return _too_large(len(payload), limit)
            return message

        return deserialize


def _guarded(
    behaviour: Behaviour, limiter: ClassLimiter | None, admit: Callable[[Any], Awaitable[Caller]]
) -> Behaviour:
    """``behaviour`` with its errors as statuses; without ``limiter`` it has no limits."""

    async def guarded(request: Message | SluiceError, context: Any) -> Any:
        try:
            caller = await admit(context)
            if isinstance(request, SluiceError):
                raise request
            if limiter is None:
                return await behaviour(request, context)
            priority_class = class_of(request)
            await limiter.turn(priority_class)
            with limiter.call(priority_class, caller.tenant):
                return await behaviour(request, context)
        except SluiceError as error:
            await abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception:  # grpc would show the text of the exception to the caller
            _log.exception("a call failed")
            await abort(context, InternalError("the gateway failed; its log has the reason"))

    return guarded


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
