"""Engines of simulated workers: sequences in, and per step its duration and tokens.

A worker need not look at every step: `stretch` returns the next steps of equal composition, in
which sequences only gain tokens. So a simulation takes time by sequences, not by tokens.

`ContinuousEngine` plans each step with the `Scheduler` of the shipped engine (continuous batching,
chunked prefill, paged KV cache, preemption). `SimulatedGenerateEngine` computes whole padded
batches, like the engine "generate".
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from model_workers.engine.blocks import CPU_BLOCK_TOKENS, BlockManager
from model_workers.engine.pace import BulkPace
from model_workers.engine.protocol import SequenceSpec
from model_workers.engine.scheduler import Scheduler
from model_workers.engine.sequences import Sequence as EngineSequence
from model_workers.engine.sequences import SequenceLimits
from simulator.cost import StepCost
from simulator.trace import SimulationError
from sluice.errors import Overloaded
from sluice.internal.v1.worker_pb2 import WorkerLoad

JOIN_SHARE: Final = 0.8
"""Shortest prompt that joins a batch, as a share of its longest; as in
`model_workers.engine.generate.engine`."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that only differ by growing contexts."""

    steps: int
    first_s: float
    growth_s: float = 0.0

    def seconds(self, steps: int) -> float:
        """Return the duration of the first `steps`; each attends to one more token per sequence."""
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def steps_within(self, elapsed_s: float) -> int:
        """Return the step that runs `elapsed_s` after the start, counted from 1."""
        return 1 + bisect_left(range(1, self.steps), elapsed_s, key=self.seconds)


@dataclass(slots=True)
class StepProgress:
    """Results of steps."""

    first: list[str] = field(default_factory=list)
    """Requests that got their first token."""
    ended: list[str] = field(default_factory=list)
    tokens: int = 0
    """Answer tokens."""
    streamed: int = 0
    """Answer tokens that are sent at once."""
    cells: int = 0
    """Computed token positions: of prompts, and of sequences in each step."""
    filled: int = 0
    """Computed positions that are no padding."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine."""

    slots: int = 32
    waiting: int = 32
    """Sequences that may wait inside it for a slot."""
    prefill_tokens: int = 512
    """Maximum prompt tokens of a step (chunked prefill); 0: whole prompts."""
    cache_tokens: int = 0
    """Tokens of all sequences in slots together; 0: only slots limit it."""
    block_tokens: int = CPU_BLOCK_TOKENS
    """Tokens of a block of the KV cache."""


class ContinuousEngine:
    """Continuous batching, for prompts that share no prefix.

    Args:
        cost: duration of a step.
        limits: limits of the engine.
        longest: tokens of the longest sequence, prompt and answer.
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
            # A prompt must leave space for a token.
            SequenceLimits(
                limits.slots, limits.waiting, longest, limits.prefill_tokens or blocks * size
            ),
        )
        self._pace = BulkPace(cost.prefill_token_s, cost(0, limits.slots, 0))
        self._plan: list[tuple[EngineSequence, int]] = []
        self._steps = 0

    def admit(self, sequences: Sequence[SequenceSpec]) -> list[str]:
        """Accept the sequences of a batch; return the ids of those that it refuses because it is full."""
        refused = []
        for sequence in sequences:
            try:
                self._scheduler.add(sequence)
            except Overloaded:
                refused.append(sequence.request_id)
        return refused

    def cancel(self, request_id: str) -> None:
        """Drop a sequence before the next `stretch`; an unknown one is ignored."""
        self._scheduler.cancel((request_id,))

    def stretch(self, now: float) -> Stretch | None:
        """Return the next steps; None without sequences. Sequences admitted meanwhile join after `advance`."""
        self._scheduler.sweep(0.0)  # Deadlines are events of the simulation, not of the engine.
        limit = self._pace.limit(self._scheduler.most_urgent(), now)
        self._plan = self._scheduler.schedule(limit)
        if not self._plan:
            return None
        decoding = [sequence for sequence, _ in self._plan if _decodes(sequence)]
        prompts = [(sequence, count) for sequence, count in self._plan if not _decodes(sequence)]
        tokens = sum(count for _, count in prompts)
        attended = sum(count * (sequence.computed + count / 2) for sequence, count in prompts)
        context = sum(len(sequence.tokens) for sequence in decoding)
        first_s = self._cost(tokens, len(decoding), context, attended)
        steps = 1 if prompts else self._equal_steps(decoding)
        return Stretch(steps, first_s, self._cost.context_token_s * len(decoding))

    def advance(self, steps: int) -> StepProgress:
        """Do the first `steps` of the last `stretch`."""
        progress = StepProgress()
        self._steps += steps
        progress.cells = progress.filled = sum(count + steps - 1 for _, count in self._plan)
        for sequence, count in self._plan:
            if count < sequence.pending:  # a chunk of a prompt: no token yet
                self._scheduler.advance(sequence, count)
            else:
                self._draw(sequence, count, steps, progress)
        self._plan = []
        return progress

    def load(self) -> WorkerLoad:
        """Return its load as a worker reports it; `block_tokens` is 0 if only slots limit it."""
        load = self._scheduler.load(self._steps)
        if not self._limits.cache_tokens:
            load.block_tokens = load.cache_blocks = load.free_blocks = 0
        return load

    def _equal_steps(self, decoding: Sequence[EngineSequence]) -> int:
        """Return the steps until a sequence ends, or the cache may have no block left for one."""
        blocks = self._scheduler.blocks
        fitting = max(1, blocks.free_blocks // len(decoding) * blocks.block_tokens)
        return min(fitting, min(sequence.room for sequence in decoding))

    def _draw(
        self, sequence: EngineSequence, count: int, steps: int, progress: StepProgress
    ) -> None:
        """Add a token in each of `steps`; the first computes `count` tokens, each other one."""
        if not sequence.answered:
            progress.first.append(sequence.spec.request_id)
        progress.tokens += steps
        progress.streamed += 0 if sequence.spec.coalesce_s else steps
        step = sequence.take(sequence.spec.prompt[:1] * steps)
        fits = self._scheduler.blocks.grow(sequence.table, len(sequence.tokens) - 1)
        assert fits, "a stretch has no more steps than the cache has room for"
        self._scheduler.advance(sequence, count + steps - 1)
        if step.end is not None:
            self._scheduler.finish(sequence)
            progress.ended.append(sequence.spec.request_id)


def _decodes(sequence: EngineSequence) -> bool:
    return sequence.pending == 1 and sequence.answered > 0


class SimulatedGenerateEngine:
    """Whole padded batches, as `model_workers.engine.generate` computes them.

    A batch of n sequences takes a step over n times the longest prompt, then a step over n for each
    further token of its longest answer. Sequences are answered one by one, but keep their cells
    until the batch ends, and nothing joins it. A batch of the batcher is computed together; others
    that wait join it if they are about as long. A step costs what it costs `ContinuousEngine` for
    as many tokens, so that only batching differs.
    """

    def __init__(self, cost: StepCost, limits: EngineLimits, longest: int) -> None:
        self._cost = cost
        self._limits = limits
        self._waiting: list[SequenceSpec] = []
        self._batch: list[SequenceSpec] = []
        self._live: dict[str, SequenceSpec] = {}
        self._done = 0

    def admit(self, sequences: Sequence[SequenceSpec]) -> list[str]:
        """Do what `ContinuousEngine.admit` does."""
        limits = self._limits
        free = max(0, limits.slots + limits.waiting - len(self._live) - len(self._waiting))
        self._waiting += sequences[:free]
        return [sequence.request_id for sequence in sequences[free:]]

    def cancel(self, request_id: str) -> None:
        """Do what `ContinuousEngine.cancel` does."""
        if self._live.pop(request_id, None) is None:
            self._drop_waiting({request_id})

    def stretch(self, now: float) -> Stretch | None:
        """Return the next steps; None without sequences. Those admitted meanwhile wait until the batch has ended."""
        if not self._live:
            self._batch = self._next_batch() if self._waiting else []
            self._live = {sequence.request_id: sequence for sequence in self._batch}
            self._done = 0
        if not self._live:
            return None
        sequences, length = len(self._batch), self._columns
        if not self._done:  # the prompts, padded to the longest
            tokens = sequences * length
            return Stretch(1, self._cost(tokens, 0, 0, tokens * length / 2))
        first_s = self._cost(0, sequences, sequences * (length + self._done))
        steps = min(sequence.sampling.max_tokens for sequence in self._live.values()) - self._done
        return Stretch(steps, first_s, self._cost.context_token_s * sequences)

    def advance(self, steps: int) -> StepProgress:
        """Do what `ContinuousEngine.advance` does."""
        progress, sequences, live = StepProgress(), len(self._batch), list(self._live.values())
        if not self._done:
            progress.first = list(self._live)
            progress.cells = sequences * self._columns
            progress.filled = sum(len(sequence.prompt) for sequence in live)
        else:
            progress.cells, progress.filled = sequences * steps, len(live) * steps
        self._done += steps
        progress.tokens = len(live) * steps
        progress.streamed = sum(steps for sequence in live if not sequence.coalesce_s)
        progress.ended = [
            sequence.request_id for sequence in live if sequence.sampling.max_tokens <= self._done
        ]
        for request_id in progress.ended:
            del self._live[request_id]
        return progress

    def load(self) -> WorkerLoad:
        """Do what `ContinuousEngine.load` does."""
        return WorkerLoad(
            slots=self._limits.slots,
            running=len(self._live),
            waiting=len(self._waiting),
            running_tokens=sum(len(sequence.prompt) for sequence in self._live.values()),
            waiting_tokens=sum(len(sequence.prompt) for sequence in self._waiting),
            batch_running=bool(self._live),
        )

    @property
    def _columns(self) -> int:
        return max(len(sequence.prompt) for sequence in self._batch)

    def _next_batch(self) -> list[SequenceSpec]:
        """Return the batch of the most urgent waiting sequence, with others that are about as long."""
        # The most urgent request decides which batch is next; its batch stays together.
        name, slots = min(self._waiting, key=lambda s: s.rank).batch, self._limits.slots
        batch = [sequence for sequence in self._waiting if sequence.batch == name][:slots]
        longest = max(len(sequence.prompt) for sequence in batch)
        others = (sequence for sequence in self._waiting if sequence.batch != name)
        alike = [s for s in others if JOIN_SHARE * longest <= len(s.prompt) <= longest]
        batch += alike[: slots - len(batch)]
        self._drop_waiting({sequence.request_id for sequence in batch})
        return batch

    def _drop_waiting(self, names: set[str]) -> None:
        self._waiting = [s for s in self._waiting if s.request_id not in names]


SimulatedEngine = ContinuousEngine | SimulatedGenerateEngine
EngineKind = Literal["continuous", "generate"]

ENGINES: Final[Mapping[EngineKind, Callable[[StepCost, EngineLimits, int], SimulatedEngine]]] = {
    "continuous": ContinuousEngine,
    "generate": SimulatedGenerateEngine,
}
