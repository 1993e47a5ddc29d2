"""What every call passes before other work is done for it, over gRPC and over HTTP: who calls, and may that caller call
this; the limits of its class and tenant; and errors, which leave as ours.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from gateway.admission.arriving import Arriving
from gateway.admission.class_limiter import ClassLimiter
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import Caller
from sluice.errors import InternalError, SluiceError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallChecks:
    """The checks of one gateway."""

    authenticator: Authenticator
    limiter: ClassLimiter
    arriving: Arriving

    async def caller_of(
        self,
        metadata: Mapping[str, str],
        certificate_names: Collection[str],
        roles: Collection[str],
        what: str,
    ) -> Caller:
        """Who calls ``what``.

        Raises:
            PermissionDenied: without one of ``roles``.
            SluiceError: as `Authenticator.caller_of`.
        """
        caller = await self.authenticator.caller_of(metadata, certificate_names)
        caller.require(roles, what)
        return caller

    @asynccontextmanager
    async def running(self, priority_class: str, tenant: str) -> AsyncIterator[None]:
        """Counts a call while it runs; one of class bulk begins when it is its turn.

        Raises:
            ShuttingDown, Overloaded: there is no room for it; with the time to retry.
        """
        await self.limiter.turn(priority_class)
        with self.limiter.call(priority_class, tenant):
            yield


async def guarded(
    work: Awaitable[None], fail: Callable[[SluiceError], Awaitable[None]], name: str
) -> None:
    """Waits for ``work``; the error that it ends with goes to ``fail``. ``name``: of the call, for the log."""
    try:
        await work
    except SluiceError as error:
        # Without its frames, which have the request: a client that does not read would keep it in memory.
        await fail(error.with_traceback(None))
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception:  # the text of an exception is not for the caller
        _log.exception("a call failed: %s", name)
        await fail(InternalError("the gateway failed; its log has the reason"))
