"""A gRPC call, and how an error ends it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import grpc
from typing_extensions import override

from gateway.admission.call import Call
from sluice.errors import SluiceError
from sluice.startup import is_loopback

ABORT_S: Final = 5.0
"""How long gRPC may take to send the status of a call whose client does not read, in seconds."""


class GrpcCall(Call):
    """A call over gRPC; methods of our services get it in place of grpc's context.

    Attributes:
        read: Returns the next message, or `grpc.aio.EOF`.
        last: The message that leaves with the status of the call.
    """

    last: Any = None

    def __init__(
        self,
        context: Any,
        method: str,
        on_error: Callable[[SluiceError], None],
        serialize: Callable[[Any], bytes] | None,
    ) -> None:
        """Take over a call.

        Args:
            context: The call of grpc.
            method: The name of its method.
            on_error: Counts the error that it ends with.
            serialize: Serializes its messages; None if they are bytes.
        """
        self._serialize = serialize
        self._context = context
        self._method = method
        self._on_error = on_error
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

    def finish(self, message: Any) -> None:
        """Send `message` as the last one, together with the status of the call."""
        self.last = message

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Sequence[Any]) -> None:
        """End the call with the status of another server; always raises."""
        await self._context.abort(code, details, metadata)

    @override
    async def fail(self, error: SluiceError) -> None:
        """End the call with `error`; always raises.

        For a client that does not read, gRPC keeps the status: after `ABORT_S` the rest of the call is released.
        """
        self._on_error(error)
        status = error.as_abort()
        try:
            async with asyncio.timeout(ABORT_S):
                await self._context.abort(*status)
        except grpc.aio.AbortError:
            raise
        except (
            Exception
        ):  # the client does not read, or has left at its own deadline: gRPC cannot send the status
            raise asyncio.CancelledError from None


def host_of(peer: str) -> str:
    """Return the host of `peer`, an address as gRPC names it; "unix" for a Unix socket."""
    kind, _, address = unquote(peer).partition(":")
    return kind if kind == "unix" else address.rpartition(":")[0].strip("[]")


def is_local(peer: str) -> bool:
    """Return whether the client at `peer`, an address as gRPC names it, runs on this machine."""
    host = host_of(peer)
    return host == "unix" or is_loopback(host)
