"""An engine whose rows join and leave at every step: continuous batching with chunked prefill and a bounded cache."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from sluice.simulation.cost import StepCost
from sluice.simulation.engine import EngineLimits, EngineLoad, EngineRow, Progress, Stretch


class ContinuousEngine:
    """See `Engine`. Rows wait by rank, then in the order they came."""

    def __init__(self, cost: StepCost, limits: EngineLimits) -> None:
        self._cost = cost
        self._limits = limits
        self._rows: dict[str, EngineRow] = {}
        self._waiting: list[tuple[int, int, str]] = []
        self._prefilling: dict[str, EngineRow] = {}
        self._decoding: dict[str, int] = {}
        """Rows that decode, and the step after which each has ended; in the order they began."""
        self._ends: list[tuple[int, str]] = []
        self._context = 0
        """Tokens in the caches of the rows that decode."""
        self._plan: list[tuple[EngineRow, int]] = []
        self._steps = 0
        self._numbers = 0

    def admit(self, rows: Sequence[EngineRow]) -> list[str]:
        """See `Engine`."""
        refused = []
        for row in rows:
            if len(self._rows) >= self._limits.slots + self._limits.waiting:
                refused.append(row.request_id)
            else:
                self._rows[row.request_id] = row
                self._wait(row)
        return refused

    def cancel(self, request_id: str) -> None:
        """See `Engine`."""
        row = self._rows.get(request_id)
        if row is not None:
            self._leave_slot(row)
            del self._rows[request_id]
            self._plan = [(r, n) for r, n in self._plan if r is not row]

    def stretch(self) -> Stretch | None:
        """See `Engine`."""
        self._evict()
        self._join()
        self._plan = list(self._chunks())
        if not self._plan and not self._decoding:
            return None
        decoding, context = len(self._decoding), self._context
        tokens = sum(n for _, n in self._plan)
        one = self._cost(tokens, decoding, context)
        growth = self._cost.context_token_s * decoding
        steps = 1 if self._plan else self._quiet_steps()
        return Stretch(steps, lambda n: n * one + growth * n * (n - 1) / 2)

    def advance(self, steps: int) -> Progress:
        """See `Engine`."""
        progress = Progress(tokens=steps * len(self._decoding))
        self._steps += steps
        self._context += steps * len(self._decoding)
        while self._ends and self._ends[0][0] <= self._steps:
            end, request_id = heappop(self._ends)
            if self._decoding.get(request_id) == end:
                self._end(self._rows[request_id], progress)
        for row, tokens in self._plan:
            row.computed += tokens
            if row.computed == row.length:
                self._start_decoding(row, progress)
        self._plan = []
        return progress

    def load(self) -> EngineLoad:
        """See `Engine`."""
        running = self._running
        used = self._used()
        unfinished = sum(row.length - row.computed for row in self._prefilling.values())
        waits = (self._rows[r].length for _, _, r in self._waiting if self._waits(r))
        cache = self._limits.cache_tokens
        return EngineLoad(
            slots=self._limits.slots,
            running=running,
            waiting=len(self._rows) - running,
            running_tokens=used,
            waiting_tokens=unfinished + sum(waits),
            cache_tokens=cache,
            free_tokens=max(0, cache - used),
        )

    # Slots.

    def _wait(self, row: EngineRow) -> None:
        self._numbers += 1
        heappush(self._waiting, (row.rank, self._numbers, row.request_id))

    def _waits(self, request_id: str) -> bool:
        return (
            request_id in self._rows
            and request_id not in self._decoding
            and request_id not in self._prefilling
        )

    def _next_waiting(self) -> EngineRow | None:
        while self._waiting and not self._waits(self._waiting[0][2]):
            heappop(self._waiting)
        return self._rows[self._waiting[0][2]] if self._waiting else None

    def _join(self) -> None:
        while (row := self._next_waiting()) is not None and self._has_place(row):
            heappop(self._waiting)
            self._prefilling[row.request_id] = row

    def _has_place(self, row: EngineRow) -> bool:
        """Whether the row can have a slot, if need be that of a less urgent one."""
        while not self._fits(row):
            victim = self._victim(row.rank) if self._limits.preempts else None
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _fits(self, row: EngineRow) -> bool:
        if not self._running:
            return True  # Were it longer than the whole cache, no waiting would help.
        cache = self._limits.cache_tokens
        return self._running < self._limits.slots and (
            not cache or self._used() + row.length + self._running < cache
        )

    def _victim(self, rank: int) -> EngineRow | None:
        """The least urgent of the rows that decode and are less urgent than ``rank``; of those the youngest."""
        rows = [self._rows[request_id] for request_id in reversed(self._decoding)]
        worst = max(rows, key=lambda row: row.rank, default=None)
        return worst if worst is not None and worst.rank > rank else None

    def _preempt(self, row: EngineRow) -> None:
        self._leave_slot(row)
        row.computed = 0
        self._wait(row)

    def _evict(self) -> None:
        """Makes room in the cache for one more token of every row."""
        cache = self._limits.cache_tokens
        while cache and self._running > 1 and self._used() + self._running > cache:
            victim = self._victim(-1)
            if victim is None:
                return
            self._preempt(victim)

    def _leave_slot(self, row: EngineRow) -> None:
        self._prefilling.pop(row.request_id, None)
        end = self._decoding.pop(row.request_id, None)
        if end is not None:
            row.produced = row.answer - (end - self._steps)
            self._context -= row.length

    @property
    def _running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def _used(self) -> int:
        return self._context + sum(row.length for row in self._prefilling.values())

    # Steps.

    def _chunks(self) -> Iterator[tuple[EngineRow, int]]:
        """What a step computes of each prompt."""
        left = self._limits.prefill_tokens or None
        for row in self._prefilling.values():
            missing = row.length - row.computed
            tokens = missing if left is None else min(left, missing)
            if left is not None:
                left -= tokens
            if tokens:
                yield row, tokens

    def _quiet_steps(self) -> int:
        while self._ends and self._decoding.get(self._ends[0][1]) != self._ends[0][0]:
            heappop(self._ends)
        steps = self._ends[0][0] - self._steps
        if self._limits.cache_tokens:
            free = self._limits.cache_tokens - self._used()
            steps = min(steps, max(1, free // len(self._decoding)))
        return steps

    def _start_decoding(self, row: EngineRow, progress: Progress) -> None:
        """The prompt is computed, and with it the next token."""
        del self._prefilling[row.request_id]
        if not row.produced:
            progress.first.append(row.request_id)
        row.produced += 1
        progress.tokens += 1
        end = self._steps + row.answer - row.produced
        self._decoding[row.request_id] = end
        self._context += row.length
        if row.produced >= row.answer:
            self._end(row, progress)
        else:
            heappush(self._ends, (end, row.request_id))

    def _end(self, row: EngineRow, progress: Progress) -> None:
        self._leave_slot(row)
        del self._rows[row.request_id]
        progress.ended.append(row.request_id)
