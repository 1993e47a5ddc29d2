"""One run: a mesh, callers, one kind of fault again and again, and the line that comes of it."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nats.errors import Error as NatsError

from sluice.errors import SetupError
from tests.robustness.faults.callers import Load, Question, calm_answers
from tests.robustness.faults.mesh import FaultMesh, Topology
from tests.robustness.faults.registry import FAULTS, Fault
from tests.robustness.faults.results import Expected, Line
from tests.robustness.faults.start import fault_mesh

WARM_S: Final = 2.0
"""The first seconds of a run count for no rate."""


@dataclass(frozen=True)
class Plan:
    """How a run goes.

    Attributes:
        kind: of callers, "sdk" or "plain".
        seconds: from the first call to the last one's begin.
        every: from the end of a fault to the next one, seconds; also before the first and after the last one.
        limit_s: the deadline of each call.
        faults_min: how many faults there are in any case; a run takes longer than ``seconds`` for them.
    """

    topology: Topology
    kind: str
    callers: int
    seconds: float
    every: float
    limit_s: float
    faults_min: int = 1


@dataclass(frozen=True)
class Calm:
    """Questions and their answers on a calm mesh."""

    asked: Sequence[Question]
    expected: Sequence[Expected]


class CalmAnswers:
    """Records the calm answers of each engine once."""

    def __init__(self) -> None:
        self._known: dict[bool, Calm] = {}

    async def of(self, mesh: FaultMesh) -> Calm:
        """Those of this mesh's engine."""
        poison = mesh.topology.poison
        if poison not in self._known:
            asked = mesh.questions
            self._known[poison] = Calm(asked, await calm_answers(mesh.addresses, asked))
        return self._known[poison]


async def run_fault(name: str, plan: Plan, calm: CalmAnswers, root: Path) -> Line:
    """Breaks a mesh of its own; its files and logs stay in ``root``.

    Raises:
        Missing: this machine lacks something.
        SetupError: the mesh did not start.
    """
    fault = FAULTS[name]
    async with fault_mesh(fault.needs(plan.topology), root) as mesh:
        known = await calm.of(mesh)
        load = Load(
            plan.kind, mesh.addresses, plan.callers, plan.limit_s, known.asked, known.expected
        )
        async with load:
            times = await _strike_again_and_again(name, fault, mesh, plan)
            end = time.monotonic()
        return load.tally.line(name, times, load.tally.begun + WARM_S, end, mesh.notes)


async def _strike_again_and_again(
    name: str, fault: Fault, mesh: FaultMesh, plan: Plan
) -> list[float]:
    """When each fault began. Behind the first `Plan.faults_min` the last one is over ``every`` before the end."""
    begun = time.monotonic()
    times: list[float] = []
    await asyncio.sleep(plan.every)
    while len(times) < plan.faults_min or time.monotonic() + plan.every < begun + plan.seconds:
        times.append(time.monotonic())
        _say(f"{times[-1] - begun:6.1f} s  {name}: {fault.about}")
        try:
            await fault.strike(mesh)
        except (OSError, SetupError, NatsError) as error:
            mesh.notes.append(f"at {times[-1] - begun:.0f} s: {type(error).__name__}: {error}")
            _say(f"          {mesh.notes[-1]}")
        await asyncio.sleep(plan.every)
    return times


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
