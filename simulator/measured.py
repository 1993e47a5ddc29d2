"""Costs measured on a real mesh: of steps, of requests in each process, and of both on shared cores.

A file of costs has JSON lines; lines of other figures are skipped:

    {"figure": "engine_cost", "phase": "decode", "points": [[rows, context tokens of all rows, ms], ...]}
    {"figure": "engine_cost", "phase": "prefill", "points": [[tokens, attended, ms], ...]}
    {"figure": "mesh_cost", ...}                a `MeshCost`, used instead of fitting the lines above
    {"figure": "process_cost_NAME", "also": ...}    a `ProcessCost`, instead of the shipped one

`sluice bench engine --fit`, `sluice bench simulation --fit` and `sluice bench processes --json`
print them.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from simulator.cores import Sharing
from simulator.cost import StepCost, StepSample, fit
from simulator.fleet import SHIPPED, ProcessCost
from simulator.results import Ending, percentiles
from simulator.simulator import Links, Setup, simulate
from simulator.trace import Arrival, SimulationError, json_object

TIMES: Final = ("ttft_p50", "ttft_p95", "latency_p50", "latency_p95")
STEPS: Final = "engine_cost"
MESH: Final = "mesh_cost"
PROCESS: Final = "process_cost_"
BOUNDS: Final = ((0.0, 3.0), (0.0, 0.1))
"""Bounds of a fitted slowdown, and of the links in and out together in seconds."""
START: Final = ((0.3, 0.002), (0.9, 0.002), (0.3, 0.006))
"""Initial simplex of the fit."""
SIMULATIONS: Final = 60
"""Maximum number of simulations in a fit."""


@dataclass(frozen=True, slots=True)
class MeshCost:
    """Costs of a mesh on one machine; `error` is the median relative error of its steps."""

    step: StepCost
    error: float
    links: Links
    sharing: Sharing

    def line(self) -> str:
        """Return the line of a file."""
        return json.dumps({"figure": MESH, **asdict(self)})


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a step with its error, of the processes, and of a mesh on shared cores if measured."""

    step: StepCost
    error: float = 0.0
    processes: Mapping[str, ProcessCost] = field(default_factory=lambda: SHIPPED)
    mesh: MeshCost | None = None


_Above0 = Annotated[float, Field(gt=0, lt=1e12)]


class _Steps(BaseModel):
    """Steps of one phase, each an amount, a context and milliseconds."""

    model_config = ConfigDict(strict=True)

    phase: Literal["decode", "prefill"]
    points: list[tuple[_Above0, Annotated[float, Field(ge=0, lt=1e12)], _Above0]]

    def samples(self) -> list[StepSample]:
        if self.phase == "decode":
            return [StepSample(0, rows, context, ms / 1e3) for rows, context, ms in self.points]
        return [StepSample(tokens, 0, 0, ms / 1e3, context) for tokens, context, ms in self.points]


class _Process(BaseModel):
    also: ProcessCost


_MESH: Final = TypeAdapter(MeshCost)


def parse_costs(lines: Iterable[str]) -> Costs:
    """Return the costs of a file.

    Raises:
        SimulationError: a line is malformed (the message has its number), or there are too few steps.
    """
    samples: list[StepSample] = []
    processes, mesh = dict(SHIPPED), None
    for number, line in enumerate(lines, start=1):
        try:
            figure = str(json_object(line).get("figure")) if line.strip() else ""
            if figure == STEPS:
                samples += _Steps.model_validate_json(line).samples()
            elif figure == MESH:
                mesh = _MESH.validate_json(line)
            elif figure.startswith(PROCESS):
                process = _Process.model_validate_json(line)
                processes[figure.removeprefix(PROCESS)] = process.also
        except ValueError as error:
            raise SimulationError.of(error, f"line {number}") from error
    # A mesh that was measured as a whole replaces a cost fitted to single steps.
    if mesh is not None:
        return Costs(mesh.step, mesh.error, processes, mesh)
    fitted = fit(samples)
    return Costs(fitted.cost, fitted.error, processes)


def times(trace: Iterable[Arrival]) -> dict[str, float]:
    """Return `TIMES` of the answered interactive requests, in seconds; 0 if there are none."""
    interactive = [arrival for arrival in trace if arrival.priority_class == "interactive"]
    first = percentiles(arrival.ttft_s for arrival in interactive)
    last = percentiles(arrival.latency_s for arrival in interactive)
    values = (first.p50, first.p95, last.p50, last.p95)
    return {name: value or 0.0 for name, value in zip(TIMES, values, strict=True)}


def simulated(trace: Sequence[Arrival], setup: Setup) -> list[Arrival]:
    """Return the same requests with their times in a simulation, in order of arrival; all must finish within it."""
    outcomes = simulate(sorted(trace, key=lambda arrival: arrival.at_s), setup).outcomes
    assert all(outcome.ending is Ending.FINISHED for outcome in outcomes)
    return [replace(o.arrival, ttft_s=o.ttft_s, latency_s=o.latency_s) for o in outcomes]


def fit_load(trace: Sequence[Arrival], setup: Setup) -> Setup:
    """Fit the slowdown of the shared cores and the delay of the links to a recorded trace.

    Minimizes the squared differences of the logarithms of `times`, measured under load and
    simulated. `setup` must have `sharing`.

    Raises:
        SimulationError: no interactive request of the trace was answered.
    """
    from scipy.optimize import minimize

    measured = times(trace)
    if not all(measured.values()):
        raise SimulationError(
            "no interactive request of the trace was answered: there is nothing to fit"
        )

    def error(point: Sequence[float]) -> float:
        simulated_s = times(simulated(trace, _with(setup, *point)))
        return sum(math.log(simulated_s[name] / seconds) ** 2 for name, seconds in measured.items())

    result = minimize(
        error,
        START[0],
        method="Nelder-Mead",
        bounds=BOUNDS,
        options={"initial_simplex": START, "maxfev": SIMULATIONS, "xatol": 1e-4, "fatol": 1e-4},
    )
    return _with(setup, *map(float, result.x))


def _with(setup: Setup, slowdown: float, ways_s: float) -> Setup:
    assert setup.sharing is not None
    links = replace(setup.links, in_s=ways_s / 2, out_s=ways_s / 2)
    return replace(setup, sharing=replace(setup.sharing, slowdown=slowdown), links=links)
