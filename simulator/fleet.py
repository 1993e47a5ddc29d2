"""The processes that a load needs in several zones, from what a request costs each of them in processor time.

A request costs a process ``request_us + token_us * answer tokens``, fitted to measured requests; the errors are the
half-widths of 95 % intervals of the fit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """Microseconds of processor time."""

    request_us: float
    token_us: float
    request_error_us: float = 0.0
    token_error_us: float = 0.0

    def core_s(self, tokens: float) -> tuple[float, float]:
        """Core-seconds of a request with that many tokens of answer, and their error."""
        return (
            (self.request_us + self.token_us * tokens) / 1e6,
            (self.request_error_us + self.token_error_us * tokens) / 1e6,
        )


SHIPPED: Final[Mapping[str, ProcessCost]] = {
    "gateway": ProcessCost(1963.0, 3.963, 158.3, 3.832),
    "batcher": ProcessCost(803.4, 0.0, 53.09, 1.285),
    "nats": ProcessCost(258.0, 0.08857, 20.25, 0.4902),
    "triton": ProcessCost(1277.0, 10.18, 112.8, 2.73),
}
"""On 2 cores, from bench/results/processes-cpu-2-cores.jsonl."""

CORES: Final[Mapping[str, float]] = {"gateway": 1.0, "batcher": 1.0, "nats": 4.0, "triton": 1.0}
"""Cores that one process can use: gateway and batcher have one event loop, nats-server is given four. Of triton what is
counted are the cores of the server and of the stub's streams, which stand beside each worker's engine."""
SERVERS: Final[Mapping[str, int]] = {"nats": 2}
"""Processes of a kind that a message passes at most, where there are so many: nats-servers pass it on from the one that
its sender is connected to, to that of its reader. None stores it."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """How much more than what is needed.

    Attributes:
        headroom: share of each process that stays free, also when a zone has failed.
        zones: in which the processes are spread evenly; of 2 and more one may fail.
    """

    headroom: float = 0.3
    zones: int = 3

    def processes(self, needed: float) -> int:
        """How many in all zones, for the work of ``needed`` full ones."""
        left = max(1, self.zones - 1)
        return self.zones * math.ceil(needed / (1 - self.headroom) / left)


DEFAULT_SIZING: Final = Sizing()


@dataclass(frozen=True, slots=True)
class Fleet:
    """The processes of one kind.

    Attributes:
        needed: full processes for the load, with nothing to spare.
        error: of ``needed``, a share of it.
        processes: in all zones; low and high: at the ends of the error.
    """

    name: str
    needed: float
    error: float
    processes: int
    low: int
    high: int


def fleet(name: str, needed: float, error: float, sizing: Sizing) -> Fleet:
    """The processes of one kind, from full ones needed and the error as a share of them."""
    counts = (sizing.processes(needed * factor) for factor in (1.0, 1 - min(error, 1), 1 + error))
    return Fleet(name, needed, error, *counts)


def fleets(
    requests_per_s: float,
    tokens: float,
    sizing: Sizing,
    costs: Mapping[str, ProcessCost] = SHIPPED,
) -> list[Fleet]:
    """The processes of all kinds but the engines, for requests with ``tokens`` of answer."""
    found = []
    for name, cost in costs.items():
        core_s, error_s = cost.core_s(tokens)
        cores = requests_per_s * core_s * min(SERVERS.get(name, 1), sizing.zones)
        found.append(fleet(name, cores / CORES.get(name, 1.0), error_s / core_s, sizing))
    return found
