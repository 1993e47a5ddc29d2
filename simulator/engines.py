"""Engines of simulated workers: rows in; per step the time it takes and the tokens it produces.

A worker need not look at every step: `stretch` gives the next steps of equal composition, in which rows only gain
tokens. So the time of a simulation grows with the number of rows, not of tokens.

`ContinuousEngine` plans each step with the `Scheduler` of the shipped engine (continuous batching, chunked prefill,
paged KV cache, preemption). `GenerateEngine` computes whole padded batches, as the engine "generate" does.
"""

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from typing_extensions import override

from model_workers.engine.blocks import CPU_BLOCK_TOKENS, BlockManager
from model_workers.engine.pace import BulkPace
from model_workers.engine.protocol import (
    EngineLoad,
    Sampling,
    SequenceSpec,
)
from model_workers.engine.scheduler import Scheduler
from model_workers.engine.sequences import Sequence, SequenceLimits
from simulator.cost import StepCost
from simulator.trace import SimulationError
from sluice.errors import Overloaded

JOIN_SHARE: Final = 0.8
"""As in `model_workers.engine.generate.engine`."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One task inside an engine: tokens of its prompt, and of the answer that it will have when it ends.

    Attributes:
        rank: of its class; 0 is the most urgent.
        gather_s: how long its tokens wait for others before they are sent; 0: each goes at once, it streams.
    """

    request_id: str
    rank: int
    prompt: int
    answer: int
    gather_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that only differ in the growing contexts."""

    steps: int
    seconds: Callable[[int], float]
    """What the first n of them take."""

    def steps_within(self, elapsed_s: float) -> int:
        """The step that is running ``elapsed_s`` after the start, counted from 1."""
        low, high = 1, self.steps
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(slots=True)
class Progress:
    """The results of steps."""

    first: list[str] = field(default_factory=list)
    """Rows that got their first token."""
    ended: list[str] = field(default_factory=list)
    tokens: int = 0
    """Tokens of answers."""
    streamed: int = 0
    """Those of them that are sent at once."""
    cells: int = 0
    """Positions of tokens that were computed: of prompts, and of rows in each step."""
    filled: int = 0
    """Those of them that are no padding."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine."""

    slots: int = 32
    waiting: int = 32
    """Rows that may wait inside it for a slot."""
    prefill_tokens: int = 512
    """Most prompt tokens of a step (chunked prefill); 0: whole prompts."""
    cache_tokens: int = 0
    """Tokens of all rows in slots together; 0: no limit but the slots."""
    block_tokens: int = CPU_BLOCK_TOKENS
    """Tokens of a block of the KV cache."""


class Engine(Protocol):
    """One worker's engine."""

    def admit(self, rows: abc.Sequence[EngineRow]) -> list[str]:
        """Takes the rows of a batch; returns those that it refuses because it is full."""

    def cancel(self, request_id: str) -> None:
        """Drops a row before the next `stretch`; an unknown one is ignored."""

    def stretch(self, now: float) -> Stretch | None:
        """The next steps; None without rows. Rows admitted meanwhile join after the steps that `advance` does."""

    def advance(self, steps: int) -> Progress:
        """Does the first ``steps`` of the last `stretch`."""

    def load(self) -> EngineLoad:
        """How busy it is, as a worker reports it; ``block_tokens`` 0: only slots limit it, ``classes`` empty: no row is
        preempted for a more urgent one."""


class ContinuousEngine(Engine):
    """See `Engine`. Each row's tokens are unlike those of all others, so rows share no prefix.

    Args:
        longest: tokens of the longest row, prompt and answer.
    """

    def __init__(self, cost: StepCost, limits: EngineLimits, longest: int) -> None:
        size = limits.block_tokens
        blocks = (limits.cache_tokens or limits.slots * (longest + size)) // size
        if blocks * size < longest:
            raise SimulationError(
                f"a row of {longest} tokens does not fit a cache of {limits.cache_tokens} tokens "
                f"in blocks of {size}"
            )
        self._cost = cost
        self._limits = limits
        self._scheduler = Scheduler(
            BlockManager(blocks, size),
            # A prompt must leave room for a token.
            SequenceLimits(
                limits.slots, limits.waiting, longest, limits.prefill_tokens or blocks * size
            ),
        )
        self._pace = BulkPace(cost.prefill_token_s, cost(0, limits.slots, 0))
        self._plan: list[tuple[Sequence, int]] = []
        self._steps = 0
        self._admitted = 0

    @override
    def admit(self, rows: abc.Sequence[EngineRow]) -> list[str]:
        refused = []
        for row in rows:
            try:
                self._scheduler.add(self._spec(row))
            except Overloaded:
                refused.append(row.request_id)
        return refused

    @override
    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel((request_id,))

    @override
    def stretch(self, now: float) -> Stretch | None:
        self._scheduler.sweep(0.0)
        limit = self._pace.limit(self._scheduler.most_urgent(), now)
        self._plan = self._scheduler.schedule(limit)
        if not self._plan:
            return None
        decoding = [row for row, _ in self._plan if _decodes(row)]
        prompts = [(row, count) for row, count in self._plan if not _decodes(row)]
        tokens = sum(count for _, count in prompts)
        attended = sum(count * (row.computed + count / 2) for row, count in prompts)
        context = sum(len(row.tokens) for row in decoding)
        one = self._cost(tokens, len(decoding), context, attended)
        growth = self._cost.context_token_s * len(decoding)
        steps = 1 if prompts else self._equal_steps(decoding)
        return Stretch(steps, lambda n: n * one + growth * n * (n - 1) / 2)

    @override
    def advance(self, steps: int) -> Progress:
        progress = Progress()
        self._steps += steps
        progress.cells = progress.filled = sum(count + steps - 1 for _, count in self._plan)
        for row, count in self._plan:
            if count < row.pending:
                self._scheduler.advance(row, count)
            else:
                self._draw(row, count, steps, progress)
        self._plan = []
        return progress

    @override
    def load(self) -> EngineLoad:
        load = self._scheduler.load(self._steps)
        if not self._limits.cache_tokens:
            load = replace(load, block_tokens=0, cache_blocks=0, free_blocks=0)
        return load

    def _spec(self, row: EngineRow) -> SequenceSpec:
        self._admitted += 1
        return SequenceSpec(
            request_id=row.request_id,
            owner="",
            attempt=self._admitted,
            prompt=(self._admitted,) * row.prompt,
            produced=(),
            sampling=Sampling(max_tokens=row.answer),
            rank=row.rank,
            coalesce_s=row.gather_s,
        )

    def _equal_steps(self, decoding: abc.Sequence[Sequence]) -> int:
        """Steps until a row ends, or until the cache may have no block left for one."""
        blocks = self._scheduler.blocks
        fitting = max(1, blocks.free_blocks // len(decoding) * blocks.block_tokens)
        return min(fitting, min(row.room for row in decoding))

    def _draw(self, row: Sequence, count: int, steps: int, progress: Progress) -> None:
        """A token in each of ``steps``, which compute ``count`` tokens in the first and one in each other."""
        if not row.answered:
            progress.first.append(row.spec.request_id)
        progress.tokens += steps
        progress.streamed += 0 if row.spec.coalesce_s else steps
        step = row.take(row.spec.prompt[:1] * steps)
        fits = self._scheduler.blocks.grow(row.table, len(row.tokens) - 1)
        assert fits, "a stretch has no more steps than the cache has room for"
        self._scheduler.advance(row, count + steps - 1)
        if step.end is not None:
            self._scheduler.finish(row)
            progress.ended.append(row.spec.request_id)


def _decodes(row: Sequence) -> bool:
    return row.pending == 1 and row.answered > 0


class GenerateEngine(Engine):
    """Whole padded batches, as `model_workers.engine.generate` computes them.

    A batch of n rows takes a step over n times the longest prompt, then a step over n rows for each further token of
    its longest answer. Rows are answered one by one, but keep their cells until the batch ends, and nothing joins it.
    A batch of the batcher is computed together; others that wait join it where they are about as long. The cost of a
    step is that of the other engine for as many tokens, so that only batching makes a difference.
    """

    def __init__(self, cost: StepCost, limits: EngineLimits, longest: int) -> None:
        self._cost = cost
        self._limits = limits
        self._waiting: list[list[EngineRow]] = []
        self._batch: list[EngineRow] = []
        self._live: dict[str, EngineRow] = {}
        self._done = 0

    @override
    def admit(self, rows: abc.Sequence[EngineRow]) -> list[str]:
        room = self._limits.slots + self._limits.waiting - len(self._live) - self._count_waiting()
        taken, refused = rows[: max(0, room)], rows[max(0, room) :]
        if taken:
            self._waiting.append(list(taken))
        return [row.request_id for row in refused]

    @override
    def cancel(self, request_id: str) -> None:
        if self._live.pop(request_id, None) is None:
            kept = ([r for r in batch if r.request_id != request_id] for batch in self._waiting)
            self._waiting = [batch for batch in kept if batch]

    @override
    def stretch(self, now: float) -> Stretch | None:
        if not self._live:
            self._batch = self._next_batch() if self._waiting else []
            self._live = {row.request_id: row for row in self._batch}
            self._done = 0
        if not self._live:
            return None
        rows, length = len(self._batch), self._columns
        if not self._done:
            tokens = rows * length
            return Stretch(1, lambda n: n * self._cost(tokens, 0, 0, tokens * length / 2))
        one = self._cost(0, rows, rows * (length + self._done))
        growth = self._cost.context_token_s * rows
        steps = min(row.answer for row in self._live.values()) - self._done
        return Stretch(steps, lambda n: n * one + growth * n * (n - 1) / 2)

    @override
    def advance(self, steps: int) -> Progress:
        progress, rows, live = Progress(), len(self._batch), list(self._live.values())
        if not self._done:
            progress.first = list(self._live)
            progress.cells = rows * self._columns
            progress.filled = sum(row.prompt for row in live)
        else:
            progress.cells, progress.filled = rows * steps, len(live) * steps
        self._done += steps
        progress.tokens = len(live) * steps
        progress.streamed = sum(steps for row in live if not row.gather_s)
        progress.ended = [row.request_id for row in live if row.answer <= self._done]
        for request_id in progress.ended:
            del self._live[request_id]
        return progress

    @override
    def load(self) -> EngineLoad:
        return EngineLoad(
            slots=self._limits.slots,
            running=len(self._live),
            waiting=self._count_waiting(),
            running_tokens=sum(row.prompt for row in self._live.values()),
            waiting_tokens=sum(row.prompt for batch in self._waiting for row in batch),
            batch_running=bool(self._live),
        )

    @property
    def _columns(self) -> int:
        return max(row.prompt for row in self._batch)

    def _count_waiting(self) -> int:
        return sum(len(batch) for batch in self._waiting)

    def _next_batch(self) -> list[EngineRow]:
        """Take the batch of the most urgent row that waits, and rows of others that are about as long."""
        first = min(self._waiting, key=lambda batch: min(row.rank for row in batch))
        batch = first[: self._limits.slots]
        longest = max(row.prompt for row in batch)
        others = (row for other in self._waiting if other is not first for row in other)
        alike = [row for row in others if JOIN_SHARE * longest <= row.prompt <= longest]
        batch += alike[: self._limits.slots - len(batch)]
        names = {row.request_id for row in batch}
        kept = ([row for row in other if row.request_id not in names] for other in self._waiting)
        self._waiting = [other for other in kept if other]
        return batch


EngineKind = Literal["continuous", "generate"]

ENGINES: Final[Mapping[EngineKind, Callable[[StepCost, EngineLimits, int], Engine]]] = {
    "continuous": ContinuousEngine,
    "generate": GenerateEngine,
}
