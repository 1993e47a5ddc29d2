"""Chooses how each call of the gRPC server is served; `gateway.api.methods` serves it."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from gateway.admission.arrivals import Arrivals
from gateway.api.methods import OURS, HealthMethod, Method, StreamMethod, UnaryMethod

HEALTH: Final = "/grpc.health.v1.Health/"
"""How the methods of the health service begin."""
METHODS_MAX: Final = 256
"""Methods whose handlers are kept: callers choose names, and reflection answers any."""


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
