"""What a call passes before its message is read: who calls, whose turn it is, and what its tenant may send.

A call is known by its metadata. Its message comes later, and may be large, slow, or never end. So what a tenant can
make a gateway keep is bounded before it is read, whatever its calls are for, and tenants do not wait for each other.
Each transport does the same:

1. `Arrivals.arrive` authenticates the caller, checks its role, and waits for the turn of its tenant.
2. The message is read: by `Arrivals.receive` in one of the tenant's slots and within a time, and counted in
   `Arrivals.bytes` until the call ends.
3. `Arrivals.parse` makes a request of it.
4. `ClassLimiter.begin` lets bulk calls wait, and `ClassLimiter.running` counts the call in its class.

What follows for a request of a model is `gateway.admission.admission`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from gateway.admission.call import Call
from gateway.admission.call_turns import CallTurns
from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.count_limit import CountLimit
from gateway.admission.tenant_threads import TenantSlots, TenantThreads
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import MESH, Caller
from sluice.errors import DeadlinePassed, SluiceError
from sluice.grpc_server import HEALTH_S

MESH_ONLY: Final = frozenset({MESH})
"""Roles of methods that only processes of the mesh call: these arrive without a turn."""
RECEIVE_S: Final = 30.0
"""How long the message of a call may take to arrive, in seconds."""
RECEIVING_BYTES: Final = 64 * 1024 * 1024
"""Bytes of messages of a tenant that may be arriving at the same time."""
RECEIVING_MIN: Final = 4
"""Messages of a tenant that may arrive at the same time however large they may be."""
RECEIVING_MAX: Final = 64
"""Messages of a tenant that may arrive at the same time however small they must be."""
LOOP_BYTES: Final = 64 * 1024
"""Largest message that is parsed in the event loop, in bytes; larger ones are parsed in threads, in turns by tenant."""
KEPT_MESSAGES: Final = 4
"""Messages of the largest size that a tenant's calls may keep, if that is more than `KEPT_BYTES`."""
KEPT_BYTES: Final = 128 * 1024 * 1024
"""Bytes of messages that a tenant's calls may keep while they are answered."""
STREAMS_MAX: Final = 256
"""Concurrent calls of a tenant that have no class: of JobService, and reflection."""
UPLOADS_MAX: Final = 4
"""Concurrent uploads (client-streaming calls) of a tenant."""
WATCHERS_MAX: Final = 1024
"""Concurrent health watchers of an address, which need no credentials."""

_Message = TypeVar("_Message")


@dataclass(frozen=True)
class ErrorCounts:
    """Counts calls that fail before a request of a model exists.

    Attributes:
        failed: Counts the error of a call.
        rejected: Counts a call against the limits of its caller that is rejected for its content.
    """

    failed: Callable[[SluiceError], None] = lambda _: None
    rejected: Callable[[Caller], None] = lambda _: None


class Arrivals:
    """The arriving calls of one gateway.

    Attributes:
        authenticator: Identifies callers.
        limiter: The calls that run.
        counts: Counts calls that fail early.
        receiving_max: Messages of a tenant that may be arriving at the same time; more wait unread.
        receive_s: How long a message may take, in seconds.
        health_s: How long a call about health may take, in seconds; watching is not limited.
        bytes: Bytes of messages that a tenant's calls keep.
        streams: Calls of a tenant that have no class.
        uploads: Those of them whose client may send many messages.
        watching: Watchers of health, by address: nobody knows their callers.
        turns: Turns of tenants to begin calls.
        arriving: Messages that are arriving or wait for that, by tenant.
        without_credentials: Calls about health by address, the oldest first.
        parsing: Threads for messages above `LOOP_BYTES`, one for each tenant.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        limiter: ClassLimiter,
        max_message_bytes: int,
        counts: ErrorCounts = ErrorCounts(),
        *,
        turns: CallTurns | None = None,
        receive_s: float = RECEIVE_S,
        health_s: float = HEALTH_S,
    ) -> None:
        """Set the limits for messages of up to `max_message_bytes`; see the class for the others."""
        self.authenticator = authenticator
        self.limiter = limiter
        self.counts = counts
        self.receive_s = receive_s
        self.health_s = health_s
        fitting = RECEIVING_BYTES // max_message_bytes
        self.receiving_max = min(max(fitting, RECEIVING_MIN), RECEIVING_MAX)
        self.bytes = CountLimit(
            max(KEPT_MESSAGES * max_message_bytes, KEPT_BYTES),
            "tenant_bytes",
            "bytes of requests of your tenant are being answered",
        )
        self.streams = CountLimit(
            STREAMS_MAX, "tenant_streams", "calls about jobs of your tenant are being answered"
        )
        self.uploads = CountLimit(
            UPLOADS_MAX, "tenant_uploads", "uploads of your tenant are being answered"
        )
        self.watching = CountLimit(
            WATCHERS_MAX, "address_watchers", "callers of your address are watching health"
        )
        self.parsing = TenantThreads("parsing", own=1)
        self.turns = turns or CallTurns()
        self.without_credentials: dict[str, dict[asyncio.Timeout, None]] = {}
        self._receiving: dict[str, TenantSlots] = {}
        self.arriving = defaultdict[str, int](int)

    async def arrive(self, call: Call, roles: frozenset[str], method: str) -> None:
        """Authenticate the caller of `call`, check that it may call `method`, and wait for its tenant's turn.

        Raises:
            Unauthenticated: Its credentials are wrong.
            PermissionDenied: It has none of `roles`.
            Overloaded: Too many calls of its tenant wait.
        """
        self.limiter.pacer.on_arrival()
        names = call.certificate_names if self.authenticator.takes_certificates else ()
        call.identify(await self.authenticator.caller_of(call.metadata, names))
        call.caller.require(roles, method)
        if roles != MESH_ONLY:
            await self.turns.take(call.caller.tenant)

    async def receive(self, tenant: str, read: Callable[[], Awaitable[_Message]]) -> _Message:
        """Return one message of `tenant`, read by `read` once the tenant has a slot for it.

        Raises:
            DeadlinePassed: It did not arrive in time.
        """
        slots = self._receiving.setdefault(tenant, TenantSlots(self.receiving_max))
        self.arriving[tenant] += 1
        try:
            await slots.take(tenant)
            try:
                async with asyncio.timeout(self.receive_s) as limit:
                    return await read()
            finally:
                slots.give(tenant)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlinePassed(
                f"the message of the call did not arrive within {self.receive_s:g} s"
            ) from None
        finally:
            self.arriving[tenant] -= 1
            if not self.arriving[tenant]:
                del self.arriving[tenant], self._receiving[tenant]

    async def pieces(
        self, messages: AsyncIterator[_Message], late: Callable[[], SluiceError]
    ) -> AsyncIterator[_Message]:
        """Yield the messages of an upload; raise the error of `late` if one takes longer than a message may."""
        while True:
            try:
                async with asyncio.timeout(self.receive_s):
                    message = await anext(messages, None)
            except TimeoutError:
                raise late() from None
            if message is None:
                return
            yield message

    async def parse(self, tenant: str, size: int, work: Callable[[], _Message]) -> _Message:
        """Return what `work` makes of a message of `size` bytes; large ones are parsed in a thread."""
        if size <= LOOP_BYTES:
            return work()
        return await self.parsing.run(tenant, work)

    @asynccontextmanager
    async def brief(self, address: str) -> AsyncIterator[None]:
        """Limit the time of a call without credentials, and the number of such calls of an address.

        One call more than `receiving_max` ends the oldest of the address: a client that sends nothing, or does not
        read, keeps nobody out.

        Raises:
            DeadlinePassed: The time is up, or too many calls of the address came later.
        """
        running = self.without_credentials.setdefault(address, {})
        if len(running) >= self.receiving_max:
            oldest = next(iter(running))
            del running[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        limit = asyncio.timeout(self.health_s)
        try:
            async with limit:
                running[limit] = None
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlinePassed(
                f"the call was not over within {self.health_s:g} s, or {self.receiving_max} of your address came "
                "later; send its message at once"
            ) from None
        finally:
            running.pop(limit, None)
            if not running and self.without_credentials.get(address) is running:
                del self.without_credentials[address]

    def close(self) -> None:
        """Begin and parse nothing more."""
        self.parsing.close()
        self.turns.close()
