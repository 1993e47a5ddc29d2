"""Engines of simulated workers: rows in; per step the time it takes and the tokens it produces.

A worker need not look at every step: `stretch` gives the next steps of equal composition, in which rows only gain
tokens. So the time of a simulation grows with the number of rows, not of tokens.

`ContinuousEngine` plans each step with the `Scheduler` of the shipped engine (continuous batching, chunked prefill,
paged KV cache, preemption). `PaddedEngine` computes static batches, and shows what padding costs.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from typing_extensions import override

from model_workers.engine.blocks import CPU_BLOCK_TOKENS, BlockManager
from model_workers.engine.pace import BulkPace
from model_workers.engine.protocol import EngineFull, RowSpec, Sampling
from model_workers.engine.rows import Row, RowLimits
from model_workers.engine.scheduler import Scheduler
from simulator.cost import StepCost
from simulator.trace import SimulationError
from sluice.internal.v1 import worker_pb2


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

    def admit(self, rows: Sequence[EngineRow]) -> list[str]:
        """Takes the rows of a batch; returns those that it refuses because it is full."""

    def cancel(self, request_id: str) -> None:
        """Drops a row before the next `stretch`; an unknown one is ignored."""

    def stretch(self, now: float) -> Stretch | None:
        """The next steps; None without rows. Rows admitted meanwhile join after the steps that `advance` does."""

    def advance(self, steps: int) -> Progress:
        """Does the first ``steps`` of the last `stretch`."""

    def load(self) -> worker_pb2.WorkerLoad:
        """How busy it is, as a worker reports it; ``block_tokens`` 0: only slots limit it, ``ranks`` empty: no row is
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
            RowLimits(
                limits.slots, limits.waiting, longest, limits.prefill_tokens or blocks * size
            ),
        )
        self._pace = BulkPace(cost.prefill_token_s, cost(0, limits.slots, 0))
        self._plan: list[tuple[Row, int]] = []
        self._steps = 0
        self._admitted = 0

    @override
    def admit(self, rows: Sequence[EngineRow]) -> list[str]:
        refused = []
        for row in rows:
            try:
                self._scheduler.add(self._spec(row))
            except EngineFull:
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
        for row, count in self._plan:
            if count < row.pending:
                self._scheduler.advance(row, count)
            else:
                self._draw(row, count, steps, progress)
        self._plan = []
        return progress

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        load = self._scheduler.load(self._steps)
        if not self._limits.cache_tokens:
            load.block_tokens = load.cache_blocks = load.free_blocks = 0
        return load

    def _spec(self, row: EngineRow) -> RowSpec:
        self._admitted += 1
        return RowSpec(
            request_id=row.request_id,
            owner="",
            attempt=self._admitted,
            prompt=(self._admitted,) * row.prompt,
            produced=(),
            sampling=Sampling(max_tokens=row.answer),
            rank=row.rank,
            gather_s=row.gather_s,
        )

    def _equal_steps(self, decoding: Sequence[Row]) -> int:
        """Steps until a row ends, or until the cache may have no block left for one."""
        blocks = self._scheduler.blocks
        fitting = max(1, blocks.free_blocks // len(decoding) * blocks.block_tokens)
        return min(fitting, min(row.room for row in decoding))

    def _draw(self, row: Row, count: int, steps: int, progress: Progress) -> None:
        """A token in each of ``steps``, which compute ``count`` tokens in the first and one in each other."""
        if not row.answered:
            progress.first.append(row.spec.request_id)
        progress.tokens += steps
        progress.streamed += 0 if row.spec.gather_s else steps
        step = row.take(row.spec.prompt[:1] * steps)
        fits = self._scheduler.blocks.grow(row.table, len(row.tokens) - 1)
        assert fits, "a stretch has no more steps than the cache has room for"
        self._scheduler.advance(row, count + steps - 1)
        if step.end is not None:
            self._scheduler.finish(row)
            progress.ended.append(row.spec.request_id)


def _decodes(row: Row) -> bool:
    return row.pending == 1 and row.answered > 0


class PaddedEngine(Engine):
    """Static batches: every row is computed as long as the longest, and a batch ends before the next begins.

    A batch of n rows takes one step over n times the longest prompt, and then as many steps over n rows as the longest
    answer has more tokens. Its rows are answered together. The engine holds one batch that runs, and as many more as
    ``limits.waiting`` has rows for.
    """

    def __init__(self, cost: StepCost, limits: EngineLimits, longest: int) -> None:
        self._cost = cost
        self._limits = limits
        self._waiting: deque[list[EngineRow]] = deque()
        self._batch: list[EngineRow] = []
        self._done = 0
        self._cancelled: set[str] = set()

    def admit(self, rows: Sequence[EngineRow]) -> list[str]:
        """See `Engine`; more rows than slots make no batch."""
        room = self._limits.slots
        if self._batch or self._waiting:
            room = min(room, self._limits.waiting - sum(len(batch) for batch in self._waiting))
        taken, refused = rows[: max(0, room)], rows[max(0, room) :]
        if taken:
            self._waiting.append(list(taken))
        return [row.request_id for row in refused]

    def cancel(self, request_id: str) -> None:
        """See `Engine`; the row is computed all the same when its batch runs already."""
        rows = (row for batch in (self._batch, *self._waiting) for row in batch)
        if any(row.request_id == request_id for row in rows):
            self._cancelled.add(request_id)

    @override
    def stretch(self, now: float) -> Stretch | None:
        while not self._batch and self._waiting:
            members = self._waiting.popleft()
            self._batch = [row for row in members if row.request_id not in self._cancelled]
            self._cancelled.difference_update(row.request_id for row in members)
            self._done = 0
        if not self._batch:
            return None
        rows, length = len(self._batch), max(row.prompt for row in self._batch)
        if not self._done:
            return Stretch(1, lambda n: n * self._cost(rows * length, 0, 0))
        one = self._cost(0, rows, rows * (length + self._done))
        growth = self._cost.context_token_s * rows
        return Stretch(self._longest - self._done, lambda n: n * one + growth * n * (n - 1) / 2)

    @override
    def advance(self, steps: int) -> Progress:
        progress = Progress()
        if not self._done:
            progress.first = [row.request_id for row in self._batch]
        before, self._done = self._done, self._done + steps
        progress.tokens = sum(
            min(row.answer, self._done) - min(row.answer, before) for row in self._batch
        )
        if self._done >= self._longest:
            members = [row.request_id for row in self._batch]
            progress.ended = [name for name in members if name not in self._cancelled]
            self._cancelled.difference_update(members)
            self._batch = []
        return progress

    def load(self) -> worker_pb2.WorkerLoad:
        """See `Engine`; while a batch runs, no slot is free."""
        waiting = [row for batch in self._waiting for row in batch]
        return worker_pb2.WorkerLoad(
            slots=self._limits.slots,
            running=self._limits.slots if self._batch else 0,
            waiting=len(waiting),
            running_tokens=sum(row.prompt for row in self._batch),
            waiting_tokens=sum(row.prompt for row in waiting),
        )

    @property
    def _longest(self) -> int:
        return max(row.answer for row in self._batch)


EngineKind = Literal["continuous", "padded"]

ENGINES: Final[Mapping[EngineKind, Callable[[StepCost, EngineLimits, int], Engine]]] = {
    "continuous": ContinuousEngine,
    "padded": PaddedEngine,
}
