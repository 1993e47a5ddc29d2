"""What a step of an engine takes: linear in what it computes.

    seconds = base_s + prefill_token_s * prefill_tokens + decode_row_s * decode_rows + context_token_s * context_tokens

Fitted from measured steps. A file of them holds JSON lines as ``sluice bench engine --fit`` prints them; lines of other
figures are skipped:

    {"figure": "engine_cost", "prefill_tokens": 120, "decode_rows": 8, "context_tokens": 900, "seconds": 0.011}

``prefill_tokens`` are the prompt tokens that the step computes, ``decode_rows`` the rows that get their next token,
``context_tokens`` what the caches of those rows hold.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from sluice.simulation.failures import SimulationError

FIGURE: Final = "engine_cost"
SAMPLES_MIN: Final = 8
OUTLIER: Final = 5.0
"""A step this many times further off than the median one was disturbed by something else, and is left out."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds; see above."""

    base_s: float
    prefill_token_s: float
    decode_row_s: float
    context_token_s: float

    def __call__(self, prefill_tokens: float, decode_rows: float, context_tokens: float) -> float:
        """Seconds of one step."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_row_s * decode_rows
            + self.context_token_s * context_tokens
        )


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step."""

    prefill_tokens: float
    decode_rows: float
    context_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CostFit:
    """A cost and how well it says what was measured."""

    cost: StepCost
    samples: int
    error: float
    """Median over the samples of the relative error."""


SHIPPED: Final[Mapping[str, StepCost]] = {
    "small-cpu": StepCost(1.6e-3, 9.0e-6, 1.0e-4, 1.5e-7),
    "large-cpu": StepCost(4.2e-3, 4.5e-5, 2.5e-4, 4.0e-7),
}
"""The shipped tiers on the CPU, see docs/simulation.md for the machine and the command."""


def named_cost(name: str) -> StepCost:
    """One of `SHIPPED`.

    Raises:
        SimulationError: there is none of that name.
    """
    if name not in SHIPPED:
        raise SimulationError(f"no cost {name!r}; there are {', '.join(SHIPPED)}, or give a file")
    return SHIPPED[name]


def parse_samples(lines: Iterable[str]) -> list[StepSample]:
    """The steps of a file.

    Raises:
        SimulationError: a line is not as above, with its number.
    """
    samples = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and (values := _object(number, line)).get("figure") == FIGURE:
            samples.append(_sample(number, values))
    return samples


def fit(samples: Sequence[StepSample]) -> CostFit:
    """The cost with the least squares of the relative errors, none of its parts negative.

    Raises:
        SimulationError: fewer than `SAMPLES_MIN` steps, or none that decodes.
    """
    if len(samples) < SAMPLES_MIN or not any(sample.decode_rows for sample in samples):
        raise SimulationError(
            f"{len(samples)} steps of figure {FIGURE}: a cost needs {SAMPLES_MIN}, with decoding ones"
        )
    cost = _solve(samples)
    errors = [_error(cost, sample) for sample in samples]
    bound = OUTLIER * statistics.median(errors)
    kept = [s for s, error in zip(samples, errors, strict=True) if error <= bound]
    cost = _solve(kept)
    return CostFit(cost, len(kept), statistics.median(_error(cost, s) for s in kept))


def _solve(samples: Sequence[StepSample]) -> StepCost:
    """Least squares; a part that comes out negative is taken as 0, and the others are solved again."""
    import numpy as np

    parts = np.array(
        [(1.0, s.prefill_tokens, s.decode_rows, s.context_tokens) for s in samples]
    ) / np.array([[s.seconds] for s in samples])
    used = [column for column in range(parts.shape[1]) if parts[:, column].any()]
    solved = np.zeros(parts.shape[1])
    while used:
        solved[:] = 0.0
        solved[used] = np.linalg.lstsq(parts[:, used], np.ones(len(samples)), rcond=None)[0]
        worst = min(used, key=lambda column: float(solved[column]))
        if solved[worst] >= 0:
            break
        used.remove(worst)
    return StepCost(*(float(part) for part in solved))


def _error(cost: StepCost, sample: StepSample) -> float:
    said = cost(sample.prefill_tokens, sample.decode_rows, sample.context_tokens)
    return abs(said - sample.seconds) / sample.seconds


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise SimulationError(f"line {number}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise SimulationError(f"line {number}: is not a JSON object")
    return values


def _sample(number: int, values: Mapping[str, Any]) -> StepSample:
    found = {}
    for field in fields(StepSample):
        value = values.get(field.name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise SimulationError(f"line {number}: {field.name}: {value!r} is not a number from 0")
        found[field.name] = value
    if not found["seconds"]:
        raise SimulationError(f"line {number}: seconds: a step takes longer than 0")
    return StepSample(**found)
