"""The engine's scheduler: chooses the sequences of the next step, and how many tokens of each to compute.

    add, cancel   sequences come and go between steps
    sweep         remove cancelled and late sequences
    schedule      plan a step: [(sequence, tokens to compute)]
    advance       record tokens that the step has computed
    finish        remove a sequence that has ended

Sequences are ordered by urgency: rank of the class, then arrival. WAITING and PREEMPTED ones are in the queue and hold
no blocks; RUNNING ones hold blocks for all their tokens. A step is planned in this order:

1. Every running sequence with one token to compute decodes. If no block is left for it, the least urgent running
   sequence is preempted: its blocks are freed and it returns to the queue, to be computed again except for what stays
   in the prefix cache.
2. Prompts get up to `prefill_tokens` tokens in chunks, most urgent first. A sequence joins from the queue if there is a
   slot, blocks for all its tokens, and one reserve block for every running sequence. To let a more urgent rank join,
   running sequences of less urgent ranks are preempted. No sequence joins before the head of the queue.
3. Of sequences that want log-probabilities of given tokens, at most `SCORED_TOKENS` positions are computed in a step.
4. While more urgent sequences come, a step with a part of a bulk prompt has at most `bulk_tokens` prompt tokens. A step
   with prompts of a more urgent rank has no part of a bulk prompt, so that it is short, at most `WITHHELD_STEPS` times
   in succession. If each sequence makes a step longer, bulk sequences do not decode in such a step either, unless they
   are at most half of it.

A step may be planned while the step before it is computed. Then the last token of a sequence may still be being drawn
(`Sequence.expect`). Such a sequence decodes as if the token were known, unless it is its last one.

Every sequence ends: the most urgent sequence of all is never preempted, and one alone always fits, because the cache
holds at least one sequence of the context length.
"""

import bisect
from collections import deque
from collections.abc import Collection, Iterator
from typing import Final

from typing_extensions import override

from model_workers.engine.blocks import BlockManager
from model_workers.engine.pace import BULK_RANK
from model_workers.engine.protocol import Engine, SequenceEnd, SequenceSpec
from model_workers.engine.sequences import RequestIndex, Sequence, SequenceLimits, SequenceState
from sluice.internal.v1.worker_pb2 import ClassLoad, WorkerLoad

SCORED_TOKENS: Final = 256
"""Positions per step whose logits are kept for log-probabilities; each has as many numbers as the vocabulary."""
WITHHELD_STEPS: Final = 4
"""Maximum number of steps in succession that bulk prompts wait for more urgent ones."""
LOAD_RANKS: Final = BULK_RANK + 1
"""Number of ranks that a load distinguishes."""


class Scheduler:
    """Schedules the sequences of one engine. Independent of tensors.

    Attributes:
        copies: Blocks to copy, as (from, to), before the step is computed.
        preemptions: Number of preempted sequences.
    """

    def __init__(
        self, blocks: BlockManager, limits: SequenceLimits, *, sequences_cost_time: bool = True
    ) -> None:
        """Create a scheduler; `sequences_cost_time` says whether each sequence makes a step longer."""
        assert blocks.num_blocks >= blocks.blocks_for(limits.context_tokens)
        self.blocks = blocks
        self.limits = limits
        self.copies: list[tuple[int, int]] = []
        self.preemptions = 0
        self._queue: list[Sequence] = []
        self._running: list[Sequence] = []
        self._sequences = RequestIndex(limits)
        self._plan: dict[Sequence, int] = {}
        self._computing: set[bytes] = set()
        self._scored_left = SCORED_TOKENS
        self._sequences_cost_time = sequences_cost_time
        self._bulk_tokens = self._withheld = 0
        self._queue_blocked = False
        self._first_rank = BULK_RANK
        """Rank of the first prompt in the step that is planned."""

    def add(self, spec: SequenceSpec) -> Sequence:
        """Add a sequence to the queue; see `Engine.add`."""
        sequence, replaced = self._sequences.add(spec)
        if replaced is not None:
            self.finish(replaced)
        bisect.insort(self._queue, sequence, key=_urgency)
        return sequence

    def cancel(self, request_ids: Collection[str]) -> None:
        """Mark sequences for the next `sweep`; unknown ones are ignored."""
        self._sequences.cancel(request_ids)

    def sweep(self, now: float) -> list[tuple[Sequence, SequenceEnd]]:
        """Remove the sequences that must not be computed any further; return them with the reason."""
        ended = self._sequences.due(now)
        for sequence, _ in ended:
            self.finish(sequence)
        return ended

    def most_urgent(self) -> int:
        """Return the smallest rank of all sequences; without sequences that of bulk."""
        ranks = [sequences[0].spec.rank for sequences in (self._queue, self._running) if sequences]
        return min(ranks, default=BULK_RANK)

    def schedule(self, bulk_tokens: int = 0) -> list[tuple[Sequence, int]]:
        """Plan a step: return sequences with the number of tokens to compute. Advance or finish those computed.

        Args:
            bulk_tokens: Maximum number of prompt tokens of a step with a part of a bulk prompt; 0: no limit of its own.
        """
        self.copies = []
        self._bulk_tokens = bulk_tokens
        self._computing.clear()
        # Rule 1. A copy of the list, because making room preempts sequences of it.
        for sequence in tuple(self._running):
            decodes = sequence.pending == 1 and not sequence.full
            if decodes and sequence.state is SequenceState.RUNNING and self._make_room(sequence):
                self._plan[sequence] = 1
        # Rule 2: what is left of the step goes to prompts.
        self._plan_prompts()
        plan, self._plan = list(self._plan.items()), {}
        waits = self._bulk_waits()
        self._withheld = self._withheld + 1 if waits else 0
        # Rule 4, second half: bulk sequences do not decode in a step for urgent prompts.
        if waits and self._sequences_cost_time:
            urgent = [pair for pair in plan if pair[0].spec.rank < BULK_RANK]
            return urgent if 2 * len(urgent) < len(plan) else plan
        return plan

    def widen(self, sequence: Sequence, tokens: int) -> bool:
        """Extend the table of a planned sequence by `tokens`; return False without enough free blocks."""
        return self.blocks.grow(sequence.table, len(sequence.tokens) + tokens)

    def advance(self, sequence: Sequence, count: int) -> None:
        """Record that the next `count` tokens of a planned sequence are in the cache."""
        sequence.computed += count
        self.blocks.computed(sequence.table, sequence.tokens, sequence.computed)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        self.blocks.close(sequence.table)
        self._leave(sequence)

    def discard(self, sequence: Sequence) -> list[int]:
        """Remove a sequence whose cache content is not trusted; return the blocks that are free now."""
        freed = self.blocks.discard(sequence.table)
        self._leave(sequence)
        return freed

    def sequences(self) -> list[Sequence]:
        """Return all sequences."""
        return list(self._sequences)

    def has_sequences(self) -> bool:
        """Return whether there is anything to do."""
        return len(self._sequences) > 0

    def load(self, steps: int) -> WorkerLoad:
        """Return the load after `steps` steps."""
        # Local lists: this runs at every step.
        running, waiting, context, pending = ([0] * LOAD_RANKS for _ in range(4))
        for sequence in self._running:
            rank, tokens = sequence.urgency[0], len(sequence.tokens)
            running[rank] += 1
            context[rank] += tokens
            if tokens - sequence.computed > 1:
                pending[rank] += tokens - sequence.computed
        for sequence in self._queue:
            waiting[sequence.urgency[0]] += 1
            pending[sequence.urgency[0]] += len(sequence.tokens)
        return WorkerLoad(
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
                ClassLoad(running=r, waiting=w, running_tokens=c, waiting_tokens=p)
                for r, w, c, p in zip(running, waiting, context, pending, strict=True)
            ],
            max_tasks=self.limits.slots + self.limits.max_waiting,
            preemptions=self.preemptions,
        )

    def _make_room(self, sequence: Sequence) -> bool:
        """Get blocks for all tokens of a running sequence by preemption; return False if it was preempted itself."""
        while not self.blocks.grow(sequence.table, len(sequence.tokens)):
            # The running list is in order of urgency: the last one is the least urgent.
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _plan_prompts(self) -> None:
        """Spend the step's prompt budget, most urgent sequences first."""
        spent = 0
        limit = self.limits.prefill_tokens
        self._scored_left = SCORED_TOKENS
        self._first_rank = BULK_RANK
        for sequence in self._prompts_by_urgency():
            # A part of a bulk prompt lowers the limit of the whole step.
            most = min(limit, self._prefill_tokens(sequence))
            if spent >= most:
                return
            # The head of the queue joins before its first chunk; if it cannot, prompts that run already continue.
            if sequence.state is not SequenceState.RUNNING and not self._join(sequence):
                self._queue_blocked = True
                continue
            limit = most
            spent += self._plan_chunk(sequence, most - spent)
            self._first_rank = min(self._first_rank, sequence.spec.rank)

    def _prompts_by_urgency(self) -> Iterator[Sequence]:
        """Yield running sequences with prompt tokens to compute, merged with the heads of the queue.

        A head that does not fit blocks the queue: no sequence joins before a more urgent one.
        """
        self._queue_blocked = False
        partial = deque(s for s in self._running if s not in self._plan and not s.full)
        while True:
            # Sequences that a head of the queue has preempted meanwhile are in the queue again.
            while partial and partial[0].state is not SequenceState.RUNNING:
                partial.popleft()
            head = self._queue[0] if self._queue and not self._queue_blocked else None
            if head is not None and (not partial or head.urgency < partial[0].urgency):
                yield head
            elif partial:
                yield partial.popleft()
            else:
                return

    def _prefill_tokens(self, sequence: Sequence) -> int:
        """Return the maximum number of prompt tokens of a step with a part of the sequence's prompt."""
        most = self.limits.prefill_tokens
        if not self._bulk_tokens or sequence.spec.rank < BULK_RANK:
            return most
        return 0 if self._bulk_waits() else min(self._bulk_tokens, most)

    def _bulk_waits(self) -> bool:
        """Return whether the step is reserved for prompts of more urgent ranks."""
        is_urgent = self._bulk_tokens > 0 and self._first_rank < BULK_RANK
        return is_urgent and self._withheld < WITHHELD_STEPS

    def _plan_chunk(self, sequence: Sequence, budget: int) -> int:
        count = min(sequence.pending, budget)
        if sequence.scored:
            # Positions before the first scored one cost no logits.
            before = max(0, sequence.scored_from - sequence.computed)
            count = min(count, before + self._scored_left)
            self._scored_left -= max(0, count - before)
            if not count:
                return 0
        self._plan[sequence] = count
        # Note which units this step computes, so that an equal prompt waits for them instead of computing them twice.
        size = self.blocks.share_tokens
        first, end = sequence.computed // size, (sequence.computed + count) // size
        self._computing.update(sequence.table.hashes[first:end])
        return count

    def _join(self, sequence: Sequence) -> bool:
        """Start the head of the queue, preempting less urgent ranks if needed; return False if it cannot start now."""
        if sequence.expecting:
            return False  # its blocks are found by its tokens: it joins when the last one is known
        if self.blocks.missing(sequence.table, sequence.sharable) in self._computing:
            return False  # another sequence computes the same block in this step: it is shared one step later
        while (copies := self._open(sequence)) is None:
            if not self._fits_after_preemption(sequence):
                return False
            self._preempt(self._running[-1])
        # The sequence starts behind what the prefix cache has of it.
        self.copies += copies
        sequence.computed = self.blocks.cached_tokens(sequence.table, len(sequence.sharable))
        if sequence.cached_tokens is None:  # later ones may be the sequence's own work
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        self._queue.pop(0)
        sequence.state = SequenceState.RUNNING
        bisect.insort(self._running, sequence, key=_urgency)
        return True

    def _open(self, sequence: Sequence) -> list[tuple[int, int]] | None:
        if len(self._running) >= self.limits.slots:
            return None
        blocks, sharable = self.blocks, sequence.sharable
        # Scored positions are always computed: the cache serves the tokens before them, fresh blocks the rest.
        more = blocks.blocks_for(len(sequence.tokens)) - blocks.blocks_for(len(sharable))
        copies = blocks.open(sequence.table, sharable, reserve=len(self._running) + more)
        if copies is not None and more:
            blocks.grow(sequence.table, len(sequence.tokens))
        return copies

    def _fits_after_preemption(self, sequence: Sequence) -> bool:
        """Return whether the sequence would fit if all less urgent ranks were preempted."""
        victims = [other for other in self._running if other.spec.rank > sequence.spec.rank]
        blocks = sum(len(other.table.blocks) for other in victims)
        stay = len(self._running) - len(victims)
        needed_blocks = self.blocks.blocks_for(len(sequence.tokens)) + stay
        return bool(victims) and self.blocks.free_blocks + blocks >= needed_blocks

    def _preempt(self, sequence: Sequence) -> None:
        self._plan.pop(sequence, None)
        self._running.remove(sequence)
        sequence.state = SequenceState.PREEMPTED
        self.blocks.close(sequence.table)
        # Its tokens stay; keys and values are computed again, or found in the prefix cache.
        sequence.computed = sequence.drafted = 0
        self.preemptions += 1
        bisect.insort(self._queue, sequence, key=_urgency)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        else:
            self._queue.remove(sequence)
        sequence.state = SequenceState.ENDED
        self._sequences.remove(sequence)


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.urgency


class ScheduledEngine(Engine):
    """Base of engines whose sequences a `Scheduler` has."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps = 0

    @override
    def cancel(self, request_ids: Collection[str]) -> None:
        self._scheduler.cancel(request_ids)

    @override
    def has_sequences(self) -> bool:
        return self._scheduler.has_sequences()
