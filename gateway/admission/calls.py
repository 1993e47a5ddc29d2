"""What every call passes before other work is done for it, over gRPC and over HTTP: who calls, and may that caller call
this; the limits of its class and tenant; and errors, which leave as ours.

A call is known by its metadata; its message is read later, and may be large, slow, or never end. What a tenant can make
a gateway keep is bounded before it is read, whatever its calls are for. Tenants do not wait for each other.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.tenant_threads import counted
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import Caller
from sluice.errors import RETRY_AFTER_S, DeadlinePassed, InternalError, Overloaded, SluiceError

_log = logging.getLogger(__name__)

RECEIVE_S: Final = 30.0
"""How long the message of a call may take to arrive, seconds."""
RECEIVING_BYTES: Final = 64 * 1024 * 1024
"""Of messages of a tenant that may be arriving at the same time."""
RECEIVING_MIN: Final = 4
RECEIVING_MAX: Final = 64
HELD_MESSAGES: Final = 4
"""A tenant's calls may keep as many messages of the largest size, or `HELD_BYTES`."""
HELD_BYTES: Final = 128 * 1024 * 1024
STREAMS_MAX: Final = 256
"""Calls of a tenant beside those that have a class: of JobService, and reflection."""
SENDING_MAX: Final = 4
"""Those of them whose client may send many messages: uploads."""
HEALTH_MAX: Final = 1024
"""Calls of an address about health, which anybody may ask."""

_Message = TypeVar("_Message")


async def in_time(
    messages: AsyncIterator[_Message], late: Callable[[], SluiceError]
) -> AsyncIterator[_Message]:
    """The messages, or pieces, of an upload; ``late`` is raised when the next takes longer than a message may."""
    while True:
        try:
            async with asyncio.timeout(RECEIVE_S):
                message = await anext(messages, None)
        except TimeoutError:
            raise late() from None
        if message is None:
            return
        yield message


class Arriving:
    """What arrives at one gateway.

    Attributes:
        receiving_max: messages of a tenant that may be arriving at the same time; more wait unread.
        held_max: bytes of requests that a tenant's calls may keep.
    """

    def __init__(self, max_message_bytes: int) -> None:
        """``max_message_bytes``: the largest that is read, bytes."""
        fitting = RECEIVING_BYTES // max_message_bytes
        self.receiving_max = min(max(fitting, RECEIVING_MIN), RECEIVING_MAX)
        self.held_max = max(HELD_MESSAGES * max_message_bytes, HELD_BYTES)
        self._receiving: dict[str, asyncio.Semaphore] = {}
        self._arriving: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._sending: Counter[str] = Counter()
        self._health: Counter[str] = Counter()

    async def receive(self, tenant: str, read: Callable[[], Awaitable[_Message]]) -> _Message:
        """One message of ``tenant`` by ``read``, after those that arrive already.

        Raises:
            DeadlinePassed: it did not arrive in time.
        """
        places = self._receiving.setdefault(tenant, asyncio.Semaphore(self.receiving_max))
        try:
            with counted(self._arriving, tenant):
                async with places, asyncio.timeout(RECEIVE_S) as limit:
                    return await read()
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlinePassed(
                f"the message of the call did not arrive within {RECEIVE_S:g} s"
            ) from None
        finally:
            if tenant not in self._arriving:
                del self._receiving[tenant]

    @contextmanager
    def kept_by(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Counts the bytes that one request of ``tenant`` keeps, until the block ends.

        Yields what is called with each number of bytes that are kept. It raises Overloaded, and does not count them,
        where the calls of the tenant keep too many.
        """
        size = 0

        def keep(more: int) -> None:
            nonlocal size
            if self._held[tenant] + more > self.held_max:
                raise Overloaded(
                    f"requests of your tenant that are being answered have {self.held_max} bytes",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._held[tenant] += more
            size += more

        try:
            yield keep
        finally:
            self._held[tenant] -= size
            if not self._held[tenant]:
                del self._held[tenant]

    @contextmanager
    def stream(self, tenant: str, *, sends: bool) -> Iterator[None]:
        """Counts a call that has no class while it runs; one that ``sends`` may send many messages.

        Raises:
            Overloaded: the tenant has too many.
        """
        with self._counted(self._streams, tenant, STREAMS_MAX, "calls about jobs of your tenant"):
            if not sends:
                yield
                return
            with self._counted(self._sending, tenant, SENDING_MAX, "uploads of your tenant"):
                yield

    def health(self, address: str) -> AbstractContextManager[None]:
        """Counts a call about health, whose caller nobody knows, while it runs.

        Raises:
            Overloaded: the address has too many.
        """
        what = "calls about health of your address"
        return self._counted(self._health, address, HEALTH_MAX, what)

    def _counted(
        self, count: Counter[str], name: str, limit: int, what: str
    ) -> AbstractContextManager[None]:
        if count[name] >= limit:
            raise Overloaded(f"{limit} {what} are being answered", retry_after_s=RETRY_AFTER_S)
        return counted(count, name)


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
