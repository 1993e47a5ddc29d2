"""The call that carries a request: one RPC, one HTTP request, or one item of a job or batch.

`Call` is what the gateway knows of it. The transports implement it: `gateway.api.grpc_call.GrpcCall`,
`gateway.http.call.HttpCall`, and `ItemCall` for one request among many in a call.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
from typing_extensions import override

from gateway.identity.caller import Caller
from sluice.errors import InternalError, SluiceError

logger = logging.getLogger(__name__)

_PASSED_ON: Final = (grpc.aio.AbortError, grpc.aio.UsageError)
"""How grpc itself ends a call: it must see them."""
_T = TypeVar("_T")


class Call(ABC):
    """One call of one transport.

    Attributes:
        caller: The identity that `identify` was given.
        metadata: Headers of the call; the trace context is among them.
        route: The path of an HTTP call; empty for others.
    """

    caller: Caller
    metadata: Mapping[str, str]
    route: str = ""

    @property
    @abstractmethod
    def remaining_s(self) -> float | None:
        """Time until the deadline of the call, in seconds; None without a deadline."""

    @property
    def certificate_names(self) -> Sequence[str]:
        """Subject alternative names of the client's verified certificate."""
        return ()

    def identify(self, caller: Caller) -> None:
        """Set the caller, once it has been authenticated."""
        self.caller = caller

    @abstractmethod
    async def fail(self, error: SluiceError) -> None:
        """End the call with `error`."""

    def run(self, work: Awaitable[_T]) -> Coroutine[Any, Any, _T | None]:
        """Return the result of `work`, to be awaited; end the call with the error that it raises."""
        return fail_with(work, self.fail, self)


@dataclass
class ItemCall(Call):
    """One request of a call that carries many.

    Attributes:
        timeout_s: Time that is left for it, in seconds; None without a deadline.
        error: What it ended with.
    """

    caller: Caller
    metadata: Mapping[str, str]
    timeout_s: float | None
    error: SluiceError | None = None

    @property
    @override
    def remaining_s(self) -> float | None:
        return self.timeout_s

    @override
    async def fail(self, error: SluiceError) -> None:
        self.error = error


async def fail_with(
    work: Awaitable[_T], fail: Callable[[SluiceError], Awaitable[None]], name: object
) -> _T | None:
    """Return the result of `work`; pass the error that it raises to `fail`.

    Args:
        work: What is awaited.
        fail: Sends the error to whoever waits. An exception of our own code is logged and becomes `InternalError`.
        name: Its text names the work in the log.
    """
    try:
        return await work
    except SluiceError as raised:
        # Without its frames, which hold the request: a client that does not read would keep it in memory.
        error = raised.with_traceback(None)
    except _PASSED_ON:
        raise
    except Exception:  # the text of an exception is not for the caller
        logger.exception("call failed: %s", name)
        error = internal_error()
    try:
        await fail(error)
    except _PASSED_ON:
        raise
    except Exception:
        logger.exception("sending %s to a caller failed: %s", error.reason, name)
        await fail(internal_error())
    return None


def internal_error() -> InternalError:
    """Return the error of a call that met a fault of the gateway."""
    return InternalError("the gateway failed; its log has the reason")
