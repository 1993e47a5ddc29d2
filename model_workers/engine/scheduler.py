"""The engine's scheduler: chooses the rows of the next step, and how many tokens of each to compute.

    add / cancel   rows come and go between steps
    sweep          takes out what is cancelled or past its deadline
    schedule       plans a step: [(row, tokens to compute)]
    advance        the step has computed tokens of a row
    finish         a row has ended

Rows are ordered by urgency: the rank of their class, then their arrival. WAITING and PREEMPTED rows are in the queue
and hold no blocks; RUNNING rows hold blocks for all their tokens. A step is planned like this:

1. Every running row with one token to compute decodes. When no block is left for it, the least urgent running row is
   preempted: its blocks are freed and it returns to the queue, to be computed again (except what is still in the prefix
   cache).
2. Prompts get up to ``prefill_tokens`` tokens, most urgent first, in chunks. A row joins from the queue when a slot and
   blocks for all its tokens are there, and one more in reserve for every running row. Of rows that want
   log-probabilities, `SCORED_TOKENS` positions are computed in a step. For a row of a more urgent rank,
   running rows of less urgent ranks are preempted. No row joins before the head of the queue.
   While more urgent rows come, a step with a part of a bulk prompt has no more prompt tokens than ``bulk_tokens``. A
   step with prompts of a more urgent rank then has none of it, so that they are answered after a short one; but not
   more than `WITHHELD_STEPS` times in a row. Where each row makes a step longer, bulk rows do not decode in such a step
   either, if they are most of its rows.

A step may be planned while the one before is computed: then the last token of a row may be one that is being drawn
(`Row.expect`). Such a row decodes as if it were known, unless it is the last one it has room for.

Every row ends: the most urgent running row is never preempted for a less urgent one, and a row alone always fits,
because the cache holds at least one row as long as the context.
"""

import bisect
from collections.abc import Collection
from typing import Final

from typing_extensions import override

from model_workers.engine.blocks import BlockManager
from model_workers.engine.pace import BULK_RANK
from model_workers.engine.protocol import Engine, RowEnd, RowSpec
from model_workers.engine.rows import RequestIndex, Row, RowLimits, RowState
from sluice.internal.v1 import worker_pb2

SCORED_TOKENS: Final = 256
"""Positions of a step whose logits are kept for log-probabilities: each has as many numbers as the vocabulary."""
WITHHELD_STEPS: Final = 4
"""Steps in a row in which bulk rows that are limited wait for prompts of more urgent ranks."""
LOAD_RANKS: Final = BULK_RANK + 1
"""Ranks that a load distinguishes: all that there are."""


class Scheduler:
    """Schedules the rows of one engine. Independent of tensors."""

    def __init__(
        self, blocks: BlockManager, limits: RowLimits, *, rows_cost_time: bool = True
    ) -> None:
        """``rows_cost_time``: each row makes a step longer."""
        assert blocks.num_blocks >= blocks.blocks_for(limits.context_tokens)
        self.blocks = blocks
        self.limits = limits
        self.copies: list[tuple[int, int]] = []
        """Blocks to copy, (from, to), before the step is computed."""
        self.preemptions = 0
        self._queue: list[Row] = []
        self._running: list[Row] = []
        self._rows = RequestIndex(limits)
        self._plan: dict[Row, int] = {}
        self._computing: set[bytes] = set()
        self._scored_left = SCORED_TOKENS
        self._rows_cost_time = rows_cost_time
        self._bulk_tokens = self._withheld = 0
        self._first_rank = BULK_RANK
        """Of the first prompt in the step that is planned."""

    def add(self, spec: RowSpec) -> Row:
        """Takes a row; see `Engine.add`."""
        row, replaced = self._rows.add(spec)
        if replaced is not None:
            self.finish(replaced)
        bisect.insort(self._queue, row, key=_urgency)
        return row

    def cancel(self, request_ids: Collection[str]) -> None:
        """Marks rows; the next `sweep` takes them out. Unknown ones are ignored."""
        self._rows.cancel(request_ids)

    def sweep(self, now: float) -> list[tuple[Row, RowEnd]]:
        """Takes out rows that must not be computed any further."""
        ended = self._rows.due(now)
        for row, _ in ended:
            self.finish(row)
        return ended

    def most_urgent(self) -> int:
        """The smallest rank of all rows; without rows that of bulk."""
        ranks = [rows[0].spec.rank for rows in (self._queue, self._running) if rows]
        return min(ranks, default=BULK_RANK)

    def schedule(self, bulk_tokens: int = 0) -> list[tuple[Row, int]]:
        """Plans a step: rows, and how many of their pending tokens to compute. Each is to be advanced or finished.

        ``bulk_tokens``: most prompt tokens of a step with a part of a bulk prompt; 0: no limit of its own.
        """
        self.copies = []
        self._bulk_tokens = bulk_tokens
        self._computing.clear()
        for row in tuple(self._running):
            decodes = row.pending == 1 and not row.full
            if decodes and row.state is RowState.RUNNING and self._make_room(row):
                self._plan[row] = 1
        self._plan_prompts()
        plan, self._plan = list(self._plan.items()), {}
        waits = self._bulk_waits()
        self._withheld = self._withheld + 1 if waits else 0
        if waits and self._rows_cost_time:
            urgent = [pair for pair in plan if pair[0].spec.rank < BULK_RANK]
            return urgent if 2 * len(urgent) < len(plan) else plan
        return plan

    def widen(self, row: Row, tokens: int) -> bool:
        """Makes room for ``tokens`` after those of a planned row, if free blocks suffice."""
        return self.blocks.grow(row.table, len(row.tokens) + tokens)

    def advance(self, row: Row, count: int) -> None:
        """The next ``count`` tokens of a planned row are in the cache."""
        row.computed += count
        self.blocks.computed(row.table, row.tokens, row.computed)

    def finish(self, row: Row) -> None:
        """Takes a row out."""
        self.blocks.close(row.table)
        self._leave(row)

    def discard(self, row: Row) -> list[int]:
        """Takes out a row whose cache content is not to be trusted; returns the blocks that are free now."""
        freed = self.blocks.discard(row.table)
        self._leave(row)
        return freed

    def rows(self) -> list[Row]:
        """All rows."""
        return list(self._rows)

    def has_rows(self) -> bool:
        """Whether there is anything to do."""
        return len(self._rows) > 0

    def load(self, steps: int) -> worker_pb2.WorkerLoad:
        """The load now, after so many steps."""
        # Plain numbers: this is called at every step, and fields of messages are slow.
        running, waiting, context, pending = ([0] * LOAD_RANKS for _ in range(4))
        for row in self._running:
            rank, tokens = row.urgency[0], len(row.tokens)
            running[rank] += 1
            context[rank] += tokens
            if tokens - row.computed > 1:
                pending[rank] += tokens - row.computed
        for row in self._queue:
            waiting[row.urgency[0]] += 1
            pending[row.urgency[0]] += len(row.tokens)
        return worker_pb2.WorkerLoad(
            slots=self.limits.slots,
            running=len(self._running),
            waiting=len(self._queue),
            context_tokens=self.limits.context_tokens,
            steps=steps,
            block_tokens=self.blocks.block_tokens,
            cache_blocks=self.blocks.num_blocks,
            free_blocks=self.blocks.free_blocks,
            running_tokens=sum(context),
            waiting_tokens=sum(pending),
            classes=[
                worker_pb2.ClassLoad(
                    running=running[rank],
                    waiting=waiting[rank],
                    running_tokens=context[rank],
                    waiting_tokens=pending[rank],
                )
                for rank in range(LOAD_RANKS)
            ],
            max_tasks=self.limits.slots + self.limits.max_waiting,
        )

    def _make_room(self, row: Row) -> bool:
        """Blocks for all tokens of a running row, preempting less urgent ones; False: it was preempted itself."""
        while not self.blocks.grow(row.table, len(row.tokens)):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is row:
                return False
        return True

    def _plan_prompts(self) -> None:
        """Spends the budget on prompts, most urgent first."""
        spent = 0
        self._scored_left = SCORED_TOKENS
        begun = [row for row in self._running if row not in self._plan and not row.full]
        self._first_rank = BULK_RANK
        limit = self.limits.prefill_tokens
        queue_moves = True
        while True:
            row = next((row for row in begun if row.state is RowState.RUNNING), None)
            head = self._queue[0] if self._queue and queue_moves else None
            is_head = head is not None and (row is None or head.urgency < row.urgency)
            following = head if is_head else row
            if following is None:
                break
            most = min(limit, self._prefill_tokens(following))
            if spent >= most:
                break
            if is_head:
                queue_moves = self._join(following)
                if not queue_moves:
                    continue
            else:
                begun.remove(following)
            limit = most
            spent += self._plan_chunk(following, most - spent)
            self._first_rank = min(self._first_rank, following.spec.rank)

    def _prefill_tokens(self, row: Row) -> int:
        """Most prompt tokens of a step with a part of the row's prompt."""
        most = self.limits.prefill_tokens
        if not self._bulk_tokens or row.spec.rank < BULK_RANK:
            return most
        return 0 if self._bulk_waits() else min(self._bulk_tokens, most)

    def _bulk_waits(self) -> bool:
        """Whether the step is for prompts of more urgent ranks."""
        is_urgent = self._bulk_tokens > 0 and self._first_rank < BULK_RANK
        return is_urgent and self._withheld < WITHHELD_STEPS

    def _plan_chunk(self, row: Row, budget: int) -> int:
        count = min(row.pending, budget)
        if row.scored:
            before = max(0, row.scored_from - row.computed)
            count = min(count, before + self._scored_left)
            self._scored_left -= max(0, count - before)
            if not count:
                return 0
        self._plan[row] = count
        size = self.blocks.share_tokens
        first, end = row.computed // size, (row.computed + count) // size
        self._computing.update(row.table.hashes[first:end])
        return count

    def _join(self, row: Row) -> bool:
        """Starts the head of the queue, preempting less urgent ranks if need be; False when it does not fit."""
        if row.expecting:
            return False  # its blocks are found by its tokens: it joins when the last one is known
        if self.blocks.missing(row.table, row.sharable) in self._computing:
            return False  # another row computes the same block in this step: it is shared one step later
        while (copies := self._open(row)) is None:
            if not self._fits_after_preemption(row):
                return False
            self._preempt(self._running[-1])
        self.copies += copies
        row.computed = self.blocks.cached_tokens(row.table, len(row.sharable))
        row.note_cached()
        self._queue.pop(0)
        row.move(RowState.RUNNING)
        bisect.insort(self._running, row, key=_urgency)
        return True

    def _open(self, row: Row) -> list[tuple[int, int]] | None:
        if len(self._running) >= self.limits.slots:
            return None
        blocks, known = self.blocks, row.sharable
        more = blocks.blocks_for(len(row.tokens)) - blocks.blocks_for(len(known))
        copies = blocks.open(row.table, known, reserve=len(self._running) + more)
        if copies is not None and more:
            blocks.grow(row.table, len(row.tokens))
        return copies

    def _fits_after_preemption(self, row: Row) -> bool:
        """Whether ``row`` would fit if all rows of less urgent ranks were preempted."""
        victims = [other for other in self._running if other.spec.rank > row.spec.rank]
        blocks = sum(len(other.table.blocks) for other in victims)
        stay = len(self._running) - len(victims)
        wanted = self.blocks.blocks_for(len(row.tokens)) + stay
        return bool(victims) and self.blocks.free_blocks + blocks >= wanted

    def _preempt(self, row: Row) -> None:
        self._plan.pop(row, None)
        self._running.remove(row)
        row.move(RowState.PREEMPTED)
        self.blocks.close(row.table)
        row.computed = row.drafted = 0
        self.preemptions += 1
        bisect.insort(self._queue, row, key=_urgency)

    def _leave(self, row: Row) -> None:
        if row.state is RowState.RUNNING:
            self._running.remove(row)
        else:
            self._queue.remove(row)
        row.move(RowState.ENDED)
        self._rows.remove(row)


def _urgency(row: Row) -> tuple[int, int]:
    return row.urgency


class ScheduledEngine(Engine):
    """An engine whose rows a `Scheduler` keeps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps = 0

    @override
    def cancel(self, request_ids: Collection[str]) -> None:
        self._scheduler.cancel(request_ids)

    @override
    def has_rows(self) -> bool:
        return self._scheduler.has_rows()
