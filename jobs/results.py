"""Reads the log of a pass in the order of its items, and what rounds of retries have replaced."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Final

from jobs.core.window import BLOCK, SPAN_MAX
from jobs.store import JobStore
from sluice.internal.v1.job_pb2 import ItemOutcome, JobCheckpoint

FIRST: Final = 1


class OrderedLog:
    """The outcomes of one pass by place. `read` may be called again: it continues where it was.

    A place without an outcome stops it, unless gaps are passed over. The outcomes behind it wait in memory, about
    `SPAN_MAX` of them at most.
    """

    def __init__(self, store: JobStore, job: str, stage: int, round_: int, first: int = 0) -> None:
        """``first``: the first place to read."""
        self._store = store
        self._pass = job, stage, round_
        self._next_place = first
        self._early: dict[int, ItemOutcome] = {}
        self._sequence = 0

    async def read(self, *, past_gaps: bool = False) -> AsyncIterator[ItemOutcome]:
        """Read the segments that are there.

        Args:
            past_gaps: no outcome is still to come, so yield those behind places that have none as well.
        """
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
        if past_gaps:
            for place in sorted(self._early):
                self._next_place = place + 1
                yield self._early.pop(place)

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


class Lookup:
    """Outcomes in the order of their indexes, read as far as the indexes that are asked for, which only grow.

    Attributes:
        head: the first outcome at or behind the last index that was asked for; None: there is none.
    """

    def __init__(self, outcomes: AsyncIterator[ItemOutcome]) -> None:
        self._outcomes = outcomes
        self._ended = False
        self.head: ItemOutcome | None = None

    async def skip_to(self, index: int) -> ItemOutcome | None:
        """Return the first outcome at ``index`` or behind it; None: there is none."""
        while not self._ended and (self.head is None or self.head.result.index < index):
            self.head = await anext(self._outcomes, None)
            self._ended = self.head is None
        return self.head

    async def at(self, index: int) -> ItemOutcome | None:
        """Return the outcome of ``index``; None: it has none."""
        head = await self.skip_to(index)
        return head if head is not None and head.result.index == index else None


async def merged(
    store: JobStore, job: str, stage: int, rounds: int, first: int = 0, *, past_gaps: bool = True
) -> AsyncIterator[ItemOutcome]:
    """Yield the outcomes of a stage by index, from ``first`` on, as they are after ``rounds`` rounds of retries.

    Args:
        past_gaps: see `OrderedLog.read`; without it only those before the first item that has no outcome yet.
    """
    past_gaps = past_gaps or rounds > 0
    async with AsyncExitStack() as stack:
        passes = []
        for round_ in range(rounds + 1):
            log = OrderedLog(store, job, stage, round_, 0 if round_ else first)
            outcomes = aclosing(log.read(past_gaps=past_gaps))  # type: ignore[type-var]
            passes.append(Lookup(await stack.enter_async_context(outcomes)))
        index = first
        while True:
            heads = [await one.skip_to(index) for one in passes]
            if not (there := [head for head in heads if head is not None]):
                return
            index = min(head.result.index for head in there)
            yield next(head for head in reversed(there) if head.result.index == index)
            index += 1


async def last_checkpoint(store: JobStore, job: str, stage: int) -> JobCheckpoint:
    """Return where the first pass over a stage is; ``unfinished`` says whether it ended early."""
    return (await store.last_segment(job, stage, 0))[0].checkpoint


async def failed(outcomes: AsyncIterator[ItemOutcome]) -> AsyncIterator[ItemOutcome]:
    """Yield the outcomes that are dead letters."""
    async for outcome in outcomes:
        if outcome.result.HasField("error"):
            yield outcome
