"""Number of processes that a load needs in several zones, from the CPU time of a request.

A request costs a process `request_us + token_us * answer tokens`, fitted to measured requests; the
errors are half-widths of 95 % intervals of the fit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """CPU time in microseconds."""

    request_us: float
    token_us: float
    request_error_us: float = 0.0
    token_error_us: float = 0.0

    def core_s(self, tokens: float) -> tuple[float, float]:
        """Return the core-seconds of a request with that many answer tokens, and their error."""
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
"""Costs measured on 2 cores, from bench/results/processes-cpu-2-cores.jsonl."""

CORES: Final[Mapping[str, float]] = {"gateway": 1.0, "batcher": 1.0, "nats": 4.0, "triton": 1.0}
"""Cores that one process can use.

Gateway and batcher have one event loop, nats-server gets four. Triton counts the server and the
stub's streams beside each worker's engine."""
SERVERS: Final[Mapping[str, int]] = {"nats": 2}
"""Processes of a kind that a message passes at most.

A nats-server passes a message on from the server of its sender to that of its reader. None stores
it."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Capacity beyond what is needed.

    Attributes:
        headroom: share of each process that stays free, even when a zone has failed.
        zones: zones over which processes are spread evenly; with two or more, one may fail.
    """

    headroom: float = 0.3
    zones: int = 3

    def processes(self, needed: float) -> int:
        """Return the number of processes in all zones for the work of `needed` full ones."""
        left = max(1, self.zones - 1)  # zones that remain when one fails
        return self.zones * math.ceil(needed / (1 - self.headroom) / left)


DEFAULT_SIZING: Final = Sizing()


@dataclass(frozen=True, slots=True)
class Fleet:
    """Processes of one kind.

    Attributes:
        needed: full processes for the load, with nothing to spare.
        error: error of `needed`, as a share of it.
        processes: in all zones.
        low: `processes` at the lower end of the error.
        high: `processes` at the upper end of the error.
    """

    name: str
    needed: float
    error: float
    processes: int
    low: int
    high: int


def fleet(name: str, needed: float, error: float, sizing: Sizing) -> Fleet:
    """Return the processes of one kind, from the full ones needed and the error as a share of them."""
    counts = (sizing.processes(needed * factor) for factor in (1.0, 1 - min(error, 1), 1 + error))
    return Fleet(name, needed, error, *counts)


def fleets(
    requests_per_s: float, tokens: float, sizing: Sizing, costs: Mapping[str, ProcessCost] = SHIPPED
) -> list[Fleet]:
    """Return the processes of all kinds but the engines, for requests with `tokens` of answer."""
    result = []
    for name, cost in costs.items():
        core_s, error_s = cost.core_s(tokens)
        cores = requests_per_s * core_s * min(SERVERS.get(name, 1), sizing.zones)
        result.append(fleet(name, cores / CORES.get(name, 1.0), error_s / core_s, sizing))
    return result
