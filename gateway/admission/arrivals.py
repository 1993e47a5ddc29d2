"""What a call passes before its message is read: who calls, whose turn it is, and what its tenant may send.

A call is known by its metadata. Its message comes later, and may be large, slow, or never end. So what a tenant can
make a gateway keep is bounded before it is read, whatever its calls are for, and tenants do not wait for each other.
Each transport does the same:

1. `Arrivals.arrive` authenticates the caller, checks its role, and waits for the turn of its tenant (`CallTurns`).
2. The message is read: by `Arrivals.receive` in one of the tenant's slots and within a time, and counted in
   `Arrivals.bytes` until the call ends.
3. `Arrivals.parse` makes a request of it.
4. Bulk calls wait for `BulkPacer`, and `ClassLimiter.running` counts the call in its class.

What follows for a request of a model is `gateway.admission.admission`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Final, TypeVar

from typing_extensions import override

from gateway.admission.class_limiter import ClassLimiter, CountLimit, overloaded
from gateway.admission.request_context import Call
from gateway.admission.turns import TenantThreads, TurnQueue
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import MESH, Caller
from sluice.errors import DeadlinePassed, SluiceError
from sluice.grpc_server import HEALTH_S

MESH_ONLY: Final = frozenset({MESH})
"""Roles of methods that only processes of the mesh call: these arrive without a turn."""
RECEIVE_S: Final = 30.0
"""How long the message of a call may take to arrive, in seconds."""
ABORT_S: Final = 5.0
"""How long gRPC may take to send the status of a call whose client does not read, in seconds."""
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

BURST: Final = 4
"""Calls of a tenant that begin in a round: together they take the event loop for a few milliseconds."""
ALONE_BURST: Final = 16
"""Calls that the only tenant begins in a round, so that rounds do not limit its throughput."""
ALONE_S: Final = 1.0
"""How long a tenant must have been the only one, in seconds."""
MOMENT_S: Final = 0.001
"""How long no call must come before a round begins, in seconds."""
PASSES: Final = 4
"""Passes of the loop without a call before a round begins; gRPC hands over a call in two."""
ARRIVALS: Final = 32
"""Calls after which a round begins although calls keep arriving."""
CALLS_WAITING_MAX: Final = 4096
"""Calls of a tenant that may wait."""

_Message = TypeVar("_Message")
_Payload = TypeVar("_Payload")


class CallTurns(TurnQueue):
    """Lets calls begin, in turns by tenant, as soon as their callers are known.

    gRPC hands calls over in order of arrival, one in a pass of the event loop. If each was worked on at once, a call
    would wait for all that came before it, whoever sent them. So calls are taken over first, which is little work, and
    only a few calls of a tenant begin at a time.

    1. A tenant begins `BURST` calls. Later ones wait for the next round.
    2. A round begins when no call has come for `MOMENT_S` and `PASSES` passes of the loop: then none waits to be taken
       over, however long a pass takes. If calls never stop arriving, it begins after `ARRIVALS` of them.
    3. In a round every tenant begins `BURST` calls.
    4. A tenant that has been the only one for `ALONE_S` begins `ALONE_BURST` calls instead, unless calls never stop
       arriving: waiting for a calm loop costs time, and there is nobody to gain it.
    5. While fewer than `BURST` calls have come in a round, none can wait, and no timer looks for the end of the round.
    """

    def __init__(self, waiting_max: int = CALLS_WAITING_MAX, moment_s: float = MOMENT_S) -> None:
        """Let up to `waiting_max` calls of a tenant wait; see `MOMENT_S`."""
        super().__init__()
        self._waiting_max = waiting_max
        self._moment_s = moment_s
        self._arrivals = self._seen = 0
        """Calls since the last round, and those of them before the last look."""
        self._passes = 0
        """Passes of the loop in which no call has come."""
        self._waits_since = 0.0
        self._next_look: asyncio.Handle | None = None
        self._latest = ""
        self._shared_until = 0.0

    async def take(self, tenant: str) -> None:
        """Wait until the next call of `tenant` may begin.

        Raises:
            Overloaded: Too many calls of the tenant wait.
        """
        self._arrivals += 1
        if self._next_look is None and self._arrivals >= BURST:
            self._seen = self._arrivals
            self._wait_a_moment()
        if tenant != self._latest:
            self._latest, before = tenant, self._latest
            self._shared_until = time.monotonic() + ALONE_S if before else 0.0
        begun, waiting = self._begun.get(tenant, 0), self._waiting.get(tenant, ())
        if not waiting and (begun < BURST or begun < self._burst()):
            self._begun[tenant] = begun + 1
            return
        if len(waiting) >= self._waiting_max:
            message = f"{self._waiting_max} calls of your tenant wait to begin"
            raise overloaded("tenant_waiting", message)
        await self._wait(tenant)

    @override
    def close(self) -> None:
        """Begin nothing more."""
        if self._next_look is not None:
            self._next_look.cancel()
        super().close()

    def _wait_a_moment(self) -> None:
        self._passes, self._waits_since = 0, time.monotonic()
        self._next_look = asyncio.get_running_loop().call_later(self._moment_s, self._look)

    def _look(self) -> None:
        is_calm, self._seen = self._seen == self._arrivals, self._arrivals
        is_idle = not self._waiting and time.monotonic() - self._waits_since < 2 * self._moment_s
        if is_calm and self._passes < PASSES and not is_idle:
            self._passes += 1
            self._next_look = asyncio.get_running_loop().call_soon(self._look)
            return
        if is_calm or self._arrivals >= ARRIVALS:
            self._arrivals = self._seen = 0
            self._release(self._burst() if is_calm else BURST)
        if self._begun or self._waiting:
            self._wait_a_moment()
        else:
            self._next_look = None

    def _burst(self) -> int:
        return BURST if time.monotonic() < self._shared_until else ALONE_BURST


@dataclass(eq=False)
class Arrivals:
    """The arriving calls of one gateway.

    Attributes:
        authenticator: Identifies callers.
        limiter: The calls that run.
        max_message_bytes: The largest message.
        on_error: Counts the error of a call that fails before a request of a model exists.
        on_rejected: Counts a call against the limits of its caller that is rejected for its content.
        receiving_max: Messages of a tenant that may be arriving at the same time; more wait unread.
        receive_s: How long a message may take, in seconds.
        health_s: How long a call about health may take, in seconds; watching is not limited.
        abort_s: See `ABORT_S`.
        bytes: Bytes of messages that a tenant's calls keep.
        streams: Calls of a tenant that have no class.
        uploads: Uploads of a tenant that run, over gRPC and HTTP.
        watching: Watchers of health, by address: nobody knows their callers.
        turns: Turns of tenants to begin calls.
        arriving: Number of messages that are arriving or wait for that, and their slots, by tenant.
        without_credentials: Calls about health by address, the oldest first.
        parsing: Threads for messages above `LOOP_BYTES`, of which a tenant uses one at a time.
    """

    authenticator: Authenticator
    limiter: ClassLimiter
    max_message_bytes: InitVar[int]
    on_error: Callable[[SluiceError], object] = lambda _: None
    on_rejected: Callable[[Caller], object] = lambda _: None
    receive_s: float = RECEIVE_S
    health_s: float = HEALTH_S
    abort_s: float = ABORT_S
    turns: CallTurns = field(default_factory=CallTurns)

    def __post_init__(self, max_message_bytes: int) -> None:
        fitting = RECEIVING_BYTES // max_message_bytes
        self.receiving_max = min(max(fitting, RECEIVING_MIN), RECEIVING_MAX)
        kept_max = max(KEPT_MESSAGES * max_message_bytes, KEPT_BYTES)
        self.bytes = CountLimit(kept_max, "tenant_bytes", "bytes of requests of your tenant")
        self.streams = CountLimit(STREAMS_MAX, "tenant_streams", "calls about jobs of your tenant")
        self.uploads = CountLimit(UPLOADS_MAX, "tenant_uploads", "uploads of your tenant")
        watchers = "health watchers of your address"
        self.watching = CountLimit(WATCHERS_MAX, "address_watchers", watchers)
        self.parsing = TenantThreads("parsing", own=1)
        self.without_credentials: dict[str, dict[asyncio.Timeout, None]] = {}
        self.arriving: dict[str, tuple[int, asyncio.Semaphore]] = {}

    async def arrive(self, call: Call, roles: frozenset[str], method: str) -> None:
        """Authenticate the caller of `call`, check that it may call `method`, and wait for its tenant's turn.

        Raises:
            Unauthenticated, InvalidRequest, TransportUnavailable: As `Authenticator.caller_of`.
            PermissionDenied: It has none of `roles`, or its metadata names another tenant.
            Overloaded: Too many calls of its tenant wait.
        """
        self.limiter.pacer.arrived_at = time.monotonic()
        names = call.certificate_names if self.authenticator.takes_certificates else ()
        call.caller = await self.authenticator.caller_of(call.metadata, names)
        if call.caller.roles.isdisjoint(roles):
            raise call.caller.refusal(roles, method)
        if roles != MESH_ONLY:
            await self.turns.take(call.caller.tenant)

    async def receive(self, tenant: str, read: Callable[[], Awaitable[_Message]]) -> _Message:
        """Return one message of `tenant`, read by `read` once the tenant has a slot for it.

        Raises:
            DeadlinePassed: It did not arrive in time.
        """
        count, slots = self.arriving.get(tenant) or (0, asyncio.Semaphore(self.receiving_max))
        self.arriving[tenant] = count + 1, slots
        try:
            async with slots, asyncio.timeout(self.receive_s) as limit:
                return await read()
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlinePassed(
                f"the message of the call did not arrive within {self.receive_s:g} s"
            ) from None
        finally:
            count = self.arriving.pop(tenant)[0] - 1
            if count:
                self.arriving[tenant] = count, slots

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

    async def parse(
        self, tenant: str, size: int, work: Callable[[_Payload], _Message], payload: _Payload
    ) -> _Message:
        """Return what `work` makes of `payload`, a message of `size` bytes; large ones are parsed in a thread."""
        if size <= LOOP_BYTES:
            return work(payload)
        return await self.parsing.run(tenant, partial(work, payload))

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
