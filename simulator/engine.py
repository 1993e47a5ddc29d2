"""Models of engines: rows in, and what each step costs and does.

A worker need not look at every step: `stretch` gives the next steps of equal composition, with nothing but tokens of
rows that go on in between. So a simulation takes time by rows, not by tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batcher.core.rooms import Use


@dataclass(slots=True)
class EngineRow:
    """One task inside an engine.

    Attributes:
        rank: of its class; 0 is the most urgent.
        prompt: tokens.
        answer: tokens that it will have when it ends.
        produced: tokens of the answer so far.
        computed: tokens of prompt and answer in the cache.
        number: in the order in which the engine got its rows.
    """

    request_id: str
    rank: int
    prompt: int
    answer: int
    produced: int = 0
    computed: int = 0
    number: int = 0

    @property
    def urgency(self) -> tuple[int, int]:
        """The smallest goes first."""
        return self.rank, self.number

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.prompt + self.produced


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that only differ in the growing contexts."""

    steps: int
    seconds: Callable[[int], float]
    """What the first n of them take."""

    def steps_within(self, elapsed_s: float) -> int:
        """The step that is running ``elapsed_s`` behind the start, counted from 1."""
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
    """What steps brought."""

    first: list[str] = field(default_factory=list)
    """Rows that got their first token."""
    ended: list[str] = field(default_factory=list)
    tokens: int = 0
    """Tokens of answers."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """As a worker reports it; ``cache_tokens`` 0: only slots limit it."""

    slots: int
    running: int
    waiting: int
    running_tokens: int
    waiting_tokens: int
    cache_tokens: int = 0
    free_tokens: int = 0
    places: int = 0
    """Rows that it takes in all; 0: it does not matter, as none gives way."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine takes."""

    slots: int = 32
    waiting: int = 32
    """Rows that may wait inside it for a slot."""
    prefill_tokens: int = 512
    """Most prompt tokens of a step (chunked prefill); 0: whole prompts."""
    cache_tokens: int = 0
    """Tokens of all rows in slots together; 0: no limit but the slots."""
    preempts: bool = True
    """Whether a waiting row takes the slot of a less urgent one, which is computed again later."""


class Engine(Protocol):
    """One worker's engine."""

    def admit(self, rows: Sequence[EngineRow]) -> list[str]:
        """Takes the rows of a batch; returns those that it refuses, as it is full."""

    def cancel(self, request_id: str) -> None:
        """Drops a row; an unknown one is ignored."""

    def stretch(self) -> Stretch | None:
        """The next steps; None without rows. Rows that are admitted meanwhile join behind what `advance` is told."""

    def advance(self, steps: int) -> Progress:
        """Does the first ``steps`` of the last `stretch`."""

    def load(self) -> EngineLoad:
        """How busy it is."""

    def uses(self) -> Sequence[Use]:
        """What rows of each rank take, the most urgent first; empty: none gives its slot to a more urgent one."""
