"""The same traffic at several speeds: how latency grows with throughput under each policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from simulator.setup import Setup
from simulator.simulator import simulate
from simulator.slo import Slo
from simulator.summary import Summary, summarize
from simulator.trace import Arrival

SPEEDS: Final = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One speed: how many times faster the trace arrives, and what came of it."""

    speed: float
    summary: Summary


def at_speed(trace: Sequence[Arrival], speed: float) -> list[Arrival]:
    """The trace, ``speed`` times as fast."""
    return [replace(arrival, at_s=arrival.at_s / speed) for arrival in trace]


def sweep(trace: Sequence[Arrival], setup: Setup, slos: Mapping[str, Slo]) -> list[LoadPoint]:
    """One run for each of `SPEEDS`."""
    points = []
    for speed in SPEEDS:
        until_s = None if setup.until_s is None else setup.until_s / speed
        history = simulate(at_speed(trace, speed), replace(setup, until_s=until_s))
        points.append(LoadPoint(speed, summarize(history, slos)))
    return points
