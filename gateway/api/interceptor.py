"""Parses and counts the requests of our services, and turns errors into ``google.rpc.Status``.

grpc answers INTERNAL to a request that it cannot parse. So requests are parsed here, into the message or an error, and
the error is raised where errors are turned into a status. Every method passes the limits of its class and tenant here,
before any other work is done for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from gateway.admission.class_limiter import ClassLimiter
from gateway.api.metadata import metadata_of
from gateway.validation.requests import class_of, tenant_of
from sluice.errors import InternalError, InvalidRequest, MessageTooLarge, SluiceError

_log = logging.getLogger(__name__)

_OURS: Final = "/sluice."
_OPERATORS: Final = frozenset(
    f"/sluice.v1.AdminService/{name}"
    for name in ("ListRequests", "CancelRequests", "DrainWorker", "ReadMetrics")
)
"""Needed most when the limits are reached."""
STATUS_DETAILS: Final = "grpc-status-details-bin"
ABORT_S: Final = 5.0

Behaviour = Callable[[Any, Any], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Parses and counts requests and turns errors into statuses, for the methods of ``sluice.*``."""

    def __init__(self, max_message_bytes: int, limiter: ClassLimiter) -> None:
        self._max_message_bytes = max_message_bytes
        self._limiter = limiter
        self._handlers: dict[str, Any] = {}
        """By method of our services."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the method that is called."""
        method = str(handler_call_details.method)
        known = self._handlers.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(_OURS):
            return handler
        if handler.request_streaming:  # it has many requests: ItemsService, JobForwarder
            return handler
        streams = handler.response_streaming
        make = (
            grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        )
        behaviour = handler.unary_stream if streams else handler.unary_unary
        made = self._handlers[method] = make(
            _guarded(behaviour, None if method in _OPERATORS else self._limiter),
            request_deserializer=self._deserializer(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return made

    def _deserializer(self, parse: Callable[[bytes], Message]) -> Callable[[bytes], Any]:
        def deserialize(payload: bytes) -> Message | SluiceError:
            if len(payload) > self._max_message_bytes:
                return _too_large(len(payload), self._max_message_bytes)
            try:
                return parse(payload)
            except DecodeError:
                return InvalidRequest(
                    "the bytes are no such message: a string is not UTF-8, or a field is broken"
                )

        return deserialize


def _guarded(behaviour: Behaviour, limiter: ClassLimiter | None) -> Behaviour:
    """``behaviour`` with its errors as statuses; without ``limiter`` it has no limits."""

    async def guarded(request: Message | SluiceError, context: Any) -> Any:
        try:
            if isinstance(request, SluiceError):
                raise request
            if limiter is None:
                return await behaviour(request, context)
            with limiter.call(class_of(request), tenant_of(metadata_of(context))):
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
    status = error.to_status()
    details = ((STATUS_DETAILS, status.SerializeToString()),)
    try:
        async with asyncio.timeout(ABORT_S):
            await context.abort(error.code, status.message, details)
    except TimeoutError:
        raise asyncio.CancelledError from None


def _too_large(size: int, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"the request has {size} bytes, the limit is {limit}",
        metadata={"bytes": str(size), "limit_bytes": str(limit)},
    )
