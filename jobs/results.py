"""Reads the log of a pass in the order of its items, and what rounds of retries have replaced."""

from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, aclosing
from typing import Final

from jobs.core.window import BLOCK, SPAN_MAX
from jobs.store import JobStore
from sluice.internal.v1.job_pb2 import ItemOutcome

FIRST: Final = 1


class OrderedLog:
    """The outcomes of one pass by place. `read` may be called again: it goes on where it was.

    A place that has no outcome yet stops it; what comes behind is kept, about `SPAN_MAX` items.
    """

    def __init__(self, store: JobStore, job: str, stage: int, round_: int, first: int = 0) -> None:
        """``first``: the first place to read."""
        self._store = store
        self._pass = job, stage, round_
        self._next_place = first
        self._early: dict[int, ItemOutcome] = {}
        self._sequence = 0

    async def read(self) -> AsyncIterator[ItemOutcome]:
        """Reads the segments that are there."""
        if not self._sequence:
            self._sequence = await self._start()
        while (found := await self._store.segment_at(*self._pass, self._sequence)) is not None:
            segment, sequence = found
            self._sequence = sequence + 1
            for outcome in segment.outcomes:
                if outcome.place >= self._next_place:
                    self._early[outcome.place] = outcome
            while (outcome := self._early.pop(self._next_place, None)) is not None:  # type: ignore[arg-type]
                self._next_place += 1
                yield outcome

    async def everything(self) -> AsyncIterator[ItemOutcome]:
        """All outcomes of the log, as they were written."""
        sequence = FIRST
        while (found := await self._store.segment_at(*self._pass, sequence)) is not None:
            segment, sequence = found[0], found[1] + 1
            for outcome in segment.outcomes:
                yield outcome

    async def _start(self) -> int:
        """A sequence at or before the first segment that may have the first place: halves the log again and again."""
        low, wanted = FIRST, self._next_place - SPAN_MAX - BLOCK
        if wanted <= 0:
            return low
        high = (await self._store.last_segment(*self._pass))[1]
        while low < high:
            middle = (low + high) // 2
            found = await self._store.segment_at(*self._pass, middle)
            if found is None or found[0].checkpoint.low_water > wanted:
                high = middle
            else:
                low = found[1] + 1
        return low


async def merged(
    store: JobStore, job: str, stage: int, rounds: int, first: int = 0
) -> AsyncIterator[ItemOutcome]:
    """The outcomes of a stage by index, from ``first`` on, as they are after ``rounds`` rounds of retries."""
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(
            aclosing(OrderedLog(store, job, stage, 0, first).read())  # type: ignore[type-var]
        )
        later = [_Peeked(OrderedLog(store, job, stage, n + 1)) for n in range(rounds)]
        async for outcome in base:
            for log in later:
                outcome = await log.at(outcome.result.index) or outcome
            yield outcome


class _Peeked:
    """One round, read along with the indexes that are asked for in order."""

    def __init__(self, log: OrderedLog) -> None:
        self._outcomes = log.read()
        self._head: ItemOutcome | None = None
        self._ended = False

    async def at(self, index: int) -> ItemOutcome | None:
        while not self._ended and (self._head is None or self._head.result.index < index):
            self._head = await anext(self._outcomes, None)
            self._ended = self._head is None
        if self._head is not None and self._head.result.index == index:
            return self._head
        return None


async def dead_letters(
    store: JobStore,
    job: str,
    stage: int,
    rounds: int,
    first: int = 0,
    reasons: Collection[str] = (),
) -> AsyncIterator[ItemOutcome]:
    """Outcomes of `merged` that failed, for one of ``reasons`` if there are any."""
    async for outcome in merged(store, job, stage, rounds, first):
        error = outcome.result
        if error.HasField("error") and (not reasons or error.error.reason in reasons):
            yield outcome
