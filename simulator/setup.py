"""What is simulated: a policy, workers and what their steps cost, and the ways between the processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from simulator.continuous import ContinuousEngine
from simulator.cost import StepCost
from simulator.engine import Engine, EngineLimits
from simulator.padded import PaddedEngine
from sluice.settings.batching import Policy

EngineKind = Literal["continuous", "padded"]

ENGINES: Final[Mapping[EngineKind, Callable[[StepCost, EngineLimits], Engine]]] = {
    "continuous": ContinuousEngine,
    "padded": PaddedEngine,
}


@dataclass(frozen=True, slots=True)
class Links:
    """What the ways take, seconds."""

    in_s: float = 0.002
    """From the caller into the work queue."""
    send_s: float = 0.001
    """From batcher to worker, and back."""
    out_s: float = 0.002
    """From the worker to the caller."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated.

    Attributes:
        weights: shares of tenants that differ from 1.
        prefetch_rows: tasks of a class that the batcher takes out of the work queue to order them.
        queue_max: tasks of a class that may wait before the gateway refuses; None: it admits everything.
        until_s: when to stop; None: when everything has ended.
    """

    policy: Policy
    cost: StepCost
    workers: int = 1
    limits: EngineLimits = field(default_factory=EngineLimits)
    engine: EngineKind = "continuous"
    links: Links = field(default_factory=Links)
    weights: Mapping[str, float] = field(default_factory=dict)
    prefetch_rows: int = 1024
    queue_max: int | None = None
    until_s: float | None = None

    def make_engine(self) -> Engine:
        """One worker's engine, empty."""
        return ENGINES[self.engine](self.cost, self.limits)
