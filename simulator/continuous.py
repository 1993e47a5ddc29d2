"""An engine whose rows join and leave at every step: continuous batching with chunked prefill and a bounded cache.

It plans a step as the scheduler of the shipped engine does: rows that decode get their token; prompts get the budget,
the most urgent first; a row joins when a slot and cache are there, if need be those of less urgent ranks.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

from batcher.core.rooms import Use
from simulator.cost import StepCost
from simulator.engine import EngineLimits, EngineLoad, EngineRow, Progress, Stretch
from sluice.wire.subjects import CLASSES

BLOCK_TOKENS: Final = 16
"""Of the prefix cache, as in the shipped engine."""


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
                self._numbers += 1
                row.number = self._numbers
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
        self._plan = self._plan_prompts()
        if not self._plan and not self._decoding:
            return None
        decoding, context = len(self._decoding), self._context
        tokens = sum(n for _, n in self._plan)
        attended = sum(n * (row.computed + n / 2) for row, n in self._plan)
        one = self._cost(tokens, decoding, context, attended)
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
            places=self._limits.slots + self._limits.waiting,
        )

    def uses(self) -> Sequence[Use]:
        """See `Engine`."""
        if not self._limits.preempts:
            return ()
        found = [Use() for _ in CLASSES]
        for row in self._rows.values():
            rows, waiting, cached = found[row.rank]
            to_compute = 0 if row.request_id in self._decoding else row.length - row.computed
            found[row.rank] = Use(rows + 1, waiting + to_compute, cached + self._length(row))
        return found

    # Slots.

    def _wait(self, row: EngineRow) -> None:
        heappush(self._waiting, (*row.urgency, row.request_id))

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

    def _join(self, row: EngineRow) -> bool:
        """Takes the next waiting row in, at the cost of less urgent ranks if need be; whether that worked."""
        while not self._fits(row, self._running, self._used()):
            if not self._limits.preempts or not self._reclaims(row):
                return False
            self._preempt(self._least_urgent())
        heappop(self._waiting)
        self._prefilling[row.request_id] = row
        return True

    def _fits(self, row: EngineRow, running: int, used: int) -> bool:
        if not running:
            return True  # Were it longer than the whole cache, no waiting would help.
        cache = self._limits.cache_tokens
        return running < self._limits.slots and (not cache or used + row.length + running < cache)

    def _reclaims(self, row: EngineRow) -> bool:
        """Whether ``row`` would fit if all rows of less urgent ranks went."""
        victims = [other for other in self._in_slots() if other.rank > row.rank]
        left = self._used() - sum(self._length(victim) for victim in victims)
        return bool(victims) and self._fits(row, self._running - len(victims), left)

    def _least_urgent(self) -> EngineRow:
        return max(self._in_slots(), key=lambda row: row.urgency)

    def _in_slots(self) -> Iterator[EngineRow]:
        yield from self._prefilling.values()
        yield from (self._rows[request_id] for request_id in self._decoding)

    def _length(self, row: EngineRow) -> int:
        end = self._decoding.get(row.request_id)
        return row.length if end is None else row.prompt + row.answer - (end - self._steps)

    def _preempt(self, row: EngineRow) -> None:
        """Whole blocks stay in the cache as long as nobody needs their place; with a limit that is not looked into."""
        cached = row.computed if row.request_id in self._prefilling else self._length(row) - 1
        self._leave_slot(row)
        row.computed = 0 if self._limits.cache_tokens else cached // BLOCK_TOKENS * BLOCK_TOKENS
        self._wait(row)

    def _evict(self) -> None:
        """Makes room in the cache for one more token of every row."""
        cache = self._limits.cache_tokens
        while cache and self._running > 1 and self._used() + self._running > cache:
            self._preempt(self._least_urgent())

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

    def _plan_prompts(self) -> list[tuple[EngineRow, int]]:
        """What a step computes of each prompt: the most urgent first, as far as the budget goes."""
        plan: list[tuple[EngineRow, int]] = []
        budget = self._limits.prefill_tokens or math.inf
        begun = sorted(self._prefilling.values(), key=lambda row: row.urgency)
        queue_moves = True
        while budget > 0:
            row = begun[0] if begun else None
            head = self._next_waiting() if queue_moves else None
            if head is not None and (row is None or head.urgency < row.urgency):
                queue_moves = self._join(head)
                begun = [other for other in begun if other.request_id in self._prefilling]
                if not queue_moves:
                    continue
                row = head
            elif row is None:
                break
            else:
                begun.pop(0)
            tokens = int(min(budget, row.length - row.computed))
            budget -= tokens
            plan.append((row, tokens))
        return plan

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
