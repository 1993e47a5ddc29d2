"""What every call passes before other work is done for it, over gRPC and over HTTP: who calls, and may that caller call
this; the limits of its class and tenant; and errors, which leave as ours.

A call is known by its metadata; its message is read later, and may be large, slow, or never end. What a tenant can make
a gateway keep is bounded before it is read, whatever its calls are for. Tenants do not wait for each other.

Calls that run: less urgent classes may hold only a share of all, so their callers, most of whom wait, never hold what
an interactive caller needs. A tenant may hold only a share of what its class may, so a newcomer finds room.

Bulk calls begin while the event loop has nothing more urgent to do. gRPC hands calls over in order of arrival, one in
each turn of the loop, whatever their class; work for a bulk call makes every turn longer, and so the wait of an
interactive call behind thousands of them. So bulk calls are only taken over at first, and begin, one at a time, when no
call has come for a moment and the loop has had little to do; a few begin in any case.

Calls that are inspected and tokenized: this takes the gateway's processor. The limits of less urgent classes keep a
burst of bulk requests from delaying an interactive request that arrives after it; inside a class tenants take turns.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import grpc

from gateway.admission.call_turns import CallTurns
from gateway.admission.tenant_threads import TenantSlots, TenantThreads
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import Caller
from sluice.errors import (
    RETRY_AFTER_S,
    DeadlinePassed,
    InternalError,
    Overloaded,
    ShuttingDown,
    SluiceError,
)
from sluice.grpc_server import HEALTH_S
from sluice.settings import CallShares
from sluice.wire.subjects import BULK_CLASS, CLASSES, RANKS

_log = logging.getLogger(__name__)

RECEIVE_S: Final = 30.0
"""How long the message of a call may take to arrive, seconds."""
RECEIVING_BYTES: Final = 64 * 1024 * 1024
"""Of messages of a tenant that may be arriving at the same time."""
LOOP_BYTES: Final = 64 * 1024
"""Longer messages and bodies are parsed in threads, in turns by tenant."""
RECEIVING_MIN: Final = 4
RECEIVING_MAX: Final = 64
HELD_MESSAGES: Final = 4
"""A tenant's calls may keep as many messages of the largest size, or `HELD_BYTES`."""
HELD_BYTES: Final = 128 * 1024 * 1024
STREAMS_MAX: Final = 256
"""Calls of a tenant beside those that have a class: of JobService, and reflection."""
SENDING_MAX: Final = 4
"""Those of them whose client may send many messages: uploads."""
WATCHING_MAX: Final = 1024
"""Watchers of health of an address, who need no credentials."""

MOMENT_S: Final = 0.001
BUSY_S: Final = 0.005
"""A loop that computes for longer than this in a moment has more to do than it can."""
PATIENCE_S: Final = 0.02
"""How often a call begins although the loop is busy, seconds."""
WAITING_MAX: Final = 16_384
ROWS_MAX: Final = 8000
PREPARED_MAX: Final[Mapping[str, int]] = {"standard": 8, "bulk": 2}
"""Requests that are prepared at the same time, by class; interactive ones are not limited."""

_Message = TypeVar("_Message")


class AnyCall(Protocol):
    """A call whose caller is known, over gRPC or HTTP, or an item of a job."""

    caller: Caller
    metadata: Mapping[str, str]
    """The trace context is among it."""

    @property
    def route(self) -> str:
        """The path of a call over HTTP; empty: it is none."""

    @property
    def remaining_s(self) -> float | None:
        """Until its deadline, seconds; None: it has none."""


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


class TimeLimit:
    """`asyncio.timeout` in a third of its CPU time: its block ends with TimeoutError when the time is up.

    Attributes:
        paused: nothing is ended as long as it is set; `resume` ends what has to end.
        expired: the block was ended.
    """

    __slots__ = ("_cancelling", "_due", "_seconds", "_task", "_timer", "expired", "paused")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.paused = self.expired = self._due = False

    def __enter__(self) -> "TimeLimit":
        task = asyncio.current_task()
        assert task is not None, "a task runs the block"
        self._task, self._cancelling = task, task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.expire)
        return self

    def expire(self) -> None:
        """The time is up."""
        self._due = self.paused
        if not self.paused and not self.expired:
            self.expired = True
            self._task.cancel()

    def resume(self) -> None:
        """What came while it was paused happens now."""
        self.paused = False
        if self._due:
            self.expire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._timer.cancel()
        # Else the block has ended by itself, or somebody else has cancelled its task too.
        own = self.expired and self._task.uncancel() <= self._cancelling
        if own and kind is asyncio.CancelledError:
            raise TimeoutError from error


class CountLimit:
    """What each tenant may have at the same time.

    Attributes:
        most: of one tenant.
        taken: by tenant; one that has nothing has no entry.
    """

    def __init__(self, most: int, what: str) -> None:
        """``what``: of what there are too many, for callers."""
        self.most, self._what = most, what
        self.taken = defaultdict[str, int](int)

    def take(self, tenant: str, count: int = 1) -> None:
        """``tenant`` has so many more, until it gives them back.

        Raises:
            Overloaded: they would be too many; they are not counted.
        """
        if self.taken.get(tenant, 0) + count > self.most:
            raise _overloaded(f"{self.most} {self._what}")
        self.taken[tenant] += count

    def give(self, tenant: str, count: int = 1) -> None:
        """``tenant`` has so many less."""
        self.taken[tenant] -= count
        if not self.taken[tenant]:
            del self.taken[tenant]

    @contextmanager
    def held(self, tenant: str, count: int = 1) -> Iterator[Callable[[int], None]]:
        """Takes ``count``, and as many more as what is yielded is called with; the end of the block gives them back."""

        def take(more: int) -> None:
            nonlocal count
            self.take(tenant, more)
            count += more

        self.take(tenant, count)
        try:
            yield take
        finally:
            self.give(tenant, count)


class Arriving:
    """What arrives at one gateway.

    Attributes:
        receiving_max: messages of a tenant that may be arriving at the same time; more wait unread.
        bytes: of requests that a tenant's calls keep.
        streams: calls of a tenant that have no class.
        uploads: those of them that may send many messages.
        watching: watchers of health, by address: nobody knows their callers.
        turns: of tenants to begin calls.
        parsing: threads for messages above `LOOP_BYTES`, one of each tenant: a message of 1 MiB with 500,000 entries
            takes 27 ms.
    """

    def __init__(self, max_message_bytes: int) -> None:
        """``max_message_bytes``: the largest that is read, bytes."""
        fitting = RECEIVING_BYTES // max_message_bytes
        self.receiving_max = min(max(fitting, RECEIVING_MIN), RECEIVING_MAX)
        bytes_max = max(HELD_MESSAGES * max_message_bytes, HELD_BYTES)
        self.bytes = CountLimit(bytes_max, "bytes of requests of your tenant are being answered")
        self.streams = CountLimit(STREAMS_MAX, "calls about jobs of your tenant are being answered")
        self.uploads = CountLimit(SENDING_MAX, "uploads of your tenant are being answered")
        self.parsing = TenantThreads("parsing", own=1)
        self.turns = CallTurns()
        self.watching = CountLimit(WATCHING_MAX, "callers of your address are watching health")
        self._brief: dict[str, dict[TimeLimit, None]] = {}
        """By address, the oldest first."""
        self._receiving: dict[str, TenantSlots] = {}
        self._arriving = defaultdict[str, int](int)

    async def parse(self, tenant: str, size: int, work: Callable[[], _Message]) -> _Message:
        """Return or raise what ``work`` makes of ``size`` bytes of ``tenant``."""
        if size <= LOOP_BYTES:
            return work()
        return await self.parsing.run(tenant, work)

    @contextmanager
    def brief(self, address: str) -> Iterator[None]:
        """Limit the time of what a caller without credentials does, and how many of ``address`` do it at once.

        One more than `receiving_max` ends the oldest: who sends nothing, or does not read, keeps nobody out.

        Raises:
            DeadlinePassed: the time is up, or too many of the address came later.
        """
        running = self._brief.setdefault(address, {})
        if len(running) >= self.receiving_max:
            oldest = next(iter(running))
            del running[oldest]
            oldest.expire()
        limit = TimeLimit(HEALTH_S)
        running[limit] = None
        try:
            with limit:
                yield
        except TimeoutError:
            if not limit.expired:
                raise
            raise DeadlinePassed(
                f"the call was not over within {HEALTH_S:g} s, or {self.receiving_max} of your address came later; "
                "send its message at once"
            ) from None
        finally:
            running.pop(limit, None)
            if not running and self._brief.get(address) is running:
                del self._brief[address]

    async def receive(self, tenant: str, read: Callable[[], Awaitable[_Message]]) -> _Message:
        """One message of ``tenant`` by ``read``, after those that arrive already.

        Raises:
            DeadlinePassed: it did not arrive in time.
        """
        places = self._receiving.setdefault(tenant, TenantSlots(self.receiving_max))
        self._arriving[tenant] += 1
        try:
            await places.take(tenant)
            try:
                with TimeLimit(RECEIVE_S) as limit:
                    return await read()
            finally:
                places.give(tenant)
        except TimeoutError:
            if not limit.expired:
                raise
            raise DeadlinePassed(
                f"the message of the call did not arrive within {RECEIVE_S:g} s"
            ) from None
        finally:
            self._arriving[tenant] -= 1
            if not self._arriving[tenant]:
                del self._arriving[tenant], self._receiving[tenant]


class ClassLimiter:
    """The calls of one gateway.

    Attributes:
        draining: set it to refuse new calls; those that run continue.
        idle: set while no call runs.
        turns: when the next bulk call may begin.
        preparing: calls that are prepared, or wait for that, by class.
        rows: of a tenant's calls about texts, each of which has many.
        tenant_limits: calls of a tenant, of each class together with the less urgent ones.
    """

    def __init__(
        self,
        limit: int,
        shares: CallShares,
        check_tenant: Callable[[str, int, int | None], None] | None = None,
    ) -> None:
        """All that may run at the same time.

        Args:
            limit: calls.
            check_tenant: refuses another call of a tenant, of which so many run here; the last argument says how many
                of class bulk, None that the call is of another class.
        """
        self._check_tenant = check_tenant
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.turns = Turns()
        by_class = (1.0, shares.standard, shares.bulk)
        self._limits = [places(limit, share) for share in by_class]
        """Of a class together with the less urgent ones, by rank."""
        self.tenant_limits = [places(most, shares.tenant) for most in self._limits]
        self._running = [0] * len(CLASSES)
        self._by_tenant: dict[str, list[int]] = {}
        """By rank, of each of which calls run."""
        self.preparing = dict.fromkeys(CLASSES, 0)
        self.rows = CountLimit(ROWS_MAX, "texts of your tenant are being computed")
        self._slots = {name: TenantSlots(count) for name, count in PREPARED_MAX.items()}

    @property
    def active(self) -> int:
        """Calls that run."""
        return sum(self._running)

    @contextmanager
    def call(self, priority_class: str, tenant: str) -> Iterator[None]:
        """Counts a call while it runs.

        Raises:
            ShuttingDown, Overloaded: there is no room for it; with the time to retry.
        """
        if self.draining:
            raise ShuttingDown("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        rank = RANKS[priority_class]
        own = self._by_tenant.get(tenant) or [0] * len(CLASSES)
        for limits, running, whose in (
            (self._limits, self._running, ""),
            (self.tenant_limits, own, " of your tenant"),
        ):
            for upto, limit in enumerate(limits[: rank + 1]):
                if sum(running[upto:]) >= limit:
                    kind = "" if upto == 0 else f"{CLASSES[upto]} and less urgent "
                    raise _overloaded(f"{limit} {kind}calls{whose} are being answered")
        if self._check_tenant is not None:
            bulk = own[rank] if priority_class == BULK_CLASS else None
            self._check_tenant(tenant, sum(own), bulk)
        self._running[rank] += 1
        self._by_tenant[tenant] = own
        own[rank] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._running[rank] -= 1
            own[rank] -= 1
            if not any(own):
                del self._by_tenant[tenant]
            if not self._by_tenant:
                self.idle.set()

    def running(self, tenant: str, *, bulk: bool = False) -> int:
        """Calls of ``tenant`` that run, all or those of class bulk."""
        return sum(self._by_tenant.get(tenant, ())[RANKS[BULK_CLASS] if bulk else 0 :])

    @property
    def tenants(self) -> set[str]:
        """Those of which calls run."""
        return set(self._by_tenant)

    def slot(self, priority_class: str, tenant: str) -> AbstractAsyncContextManager[None]:
        """Held while a request is prepared; tenants take turns. The caller limits the wait."""
        slots = self._slots.get(priority_class)
        return nullcontext() if slots is None else slots.held(tenant)

    @property
    def pending(self) -> Mapping[str, int]:
        """Calls of which nothing was sent to a batcher yet, by class; bulk calls may wait for their turn before."""
        return {**self.preparing, BULK_CLASS: self.preparing[BULK_CLASS] + self.turns.waiting}


class Turns:
    """The calls of one gateway, over gRPC and HTTP.

    Attributes:
        arrived_at: when the last call came, of any class, monotonic seconds.
    """

    def __init__(self) -> None:
        self.arrived_at = -math.inf
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._giving: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return len(self._waiting)

    async def turn(self, most: float = WAITING_MAX) -> None:
        """Returns when the next bulk call may begin.

        Raises:
            Overloaded: ``most`` wait.
        """
        if len(self._waiting) >= most:
            raise _overloaded(f"{most} bulk calls wait for their turn")
        mine = asyncio.Future[None]()
        self._waiting.append(mine)
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give())
        await mine

    async def _give(self) -> None:
        given_at = time.monotonic()
        while self._waiting:
            begun, used_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(MOMENT_S)
            # Not the time that has passed: a process that waits for a core gains nothing by waiting longer.
            busy_s, now = time.thread_time() - used_s, time.monotonic()
            calm = self.arrived_at < begun and busy_s < BUSY_S
            if calm or now - given_at > PATIENCE_S:
                given_at = now
                self._give_next()

    def _give_next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # its caller has not gone
                first.set_result(None)
                return


@dataclass(frozen=True)
class CallChecks:
    """The checks of one gateway."""

    authenticator: Authenticator
    limiter: ClassLimiter
    arriving: Arriving
    refused: Callable[[SluiceError], None] = lambda _: None
    """Counts the error that a call ends with."""
    count_refused: Callable[[Caller], None] = lambda _: None
    """Count a call against the limits of its caller that is refused for its content before it is a request."""


async def guarded(
    work: Awaitable[_Message], fail: Callable[[SluiceError], Awaitable[None]], name: object
) -> _Message | None:
    """Return what ``work`` gives; send the error that it ends with by ``fail``.

    ``name``: Its text names the call in the log, when that is written.
    """
    try:
        return await work
    except SluiceError as error:
        # Without its frames, which have the request: a client that does not read would keep it in memory.
        failed = error.with_traceback(None)
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception:  # the text of an exception is not for the caller
        _log.exception("a call failed: %s", name)
        failed = gateway_failed()
    try:
        await fail(failed)
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception:
        _log.exception("failed to send the error %s of a call: %s", failed.reason, name)
        await fail(gateway_failed())
    return None


def gateway_failed() -> InternalError:
    """Return the error of a call that ran into a fault of the gateway."""
    return InternalError("the gateway failed; its log has the reason")


def places(limit: int, share: float) -> int:
    """A share of ``limit`` places; a share of less than all leaves one, if there are two."""
    return min(math.ceil(limit * share), limit - (share < 1 < limit))


def _overloaded(message: str) -> Overloaded:
    return Overloaded(message, retry_after_s=RETRY_AFTER_S)
