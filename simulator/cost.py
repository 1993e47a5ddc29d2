"""Duration of an engine's step as a linear function of its work.

    seconds = base_s + prefill_token_s * prefill_tokens + decode_row_s * decode_rows
        + context_token_s * context_tokens + (prefill_s if prefill_tokens) + attended_s * attended

`attended` counts, for each computed prompt token, the tokens before it that it attends to. Costs
are fitted to measured steps, which `simulator/measured.py` reads from a file.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.trace import SimulationError

SAMPLES_MIN: Final = 8
"""Fewest steps that a cost is fitted to."""
REWEIGHTINGS: Final = 3
"""Iterations of the reweighted least squares."""
OUTLIER: Final = 5.0
"""Steps whose error is larger than the median by this factor were disturbed, and are left out."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients in seconds; see the module."""

    base_s: float
    prefill_token_s: float
    decode_row_s: float
    context_token_s: float
    prefill_s: float = 0.0
    """Additional seconds of a step that computes any prompt: engines make another pass over the
    model."""
    attended_s: float = 0.0

    def __call__(
        self,
        prefill_tokens: float,
        decode_rows: float,
        context_tokens: float,
        attended: float = 0.0,
    ) -> float:
        """Return the seconds of one step."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_row_s * decode_rows
            + self.context_token_s * context_tokens
            + self.prefill_s * (prefill_tokens > 0)
            + self.attended_s * attended
        )


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step."""

    prefill_tokens: float
    decode_rows: float
    context_tokens: float
    seconds: float
    attended: float = 0.0


@dataclass(frozen=True, slots=True)
class CostFit:
    """A cost and how well it predicts the measured steps."""

    cost: StepCost
    samples: int
    error: float
    """Median relative error over the samples."""


SHIPPED: Final[Mapping[str, StepCost]] = {
    "small-cpu": StepCost(1.6e-3, 1.5e-5, 2.5e-5, 3.0e-7, 4.5e-4),
    "large-cpu": StepCost(2.1e-3, 4.0e-5, 8.5e-5, 4.8e-7, 3.8e-4),
}
"""Costs of the shipped tiers on a CPU; docs/operate/simulation.md names the machine and the
command."""


def named_cost(name: str) -> StepCost:
    """Return one of `SHIPPED`.

    Raises:
        SimulationError: there is none of that name.
    """
    if name not in SHIPPED:
        raise SimulationError(f"no cost {name!r}; there are {', '.join(SHIPPED)}, or give a file")
    return SHIPPED[name]


def fit(samples: Sequence[StepSample]) -> CostFit:
    """Return the cost with the least squares of relative errors and no negative coefficient.

    Errors are relative to the predicted time: relative to the measured one, a step whose report
    came early would weigh most.

    Raises:
        SimulationError: fewer than `SAMPLES_MIN` steps, or none that decodes.
    """
    if len(samples) < SAMPLES_MIN or not any(sample.decode_rows for sample in samples):
        raise SimulationError(
            f"{len(samples)} steps were measured: a cost needs {SAMPLES_MIN}, with decoding ones"
        )
    # Absolute errors give a first prediction, to which the errors are then relative.
    cost = _solve(samples, [1.0] * len(samples))
    cost = _solve(samples, _predicted(cost, samples))
    errors = _errors(cost, samples)
    bound = OUTLIER * statistics.median(errors)
    inliers = [s for s, error in zip(samples, errors, strict=True) if error <= bound]
    # Each solution predicts better, and so weighs the errors of the next one better.
    for _ in range(REWEIGHTINGS):
        cost = _solve(inliers, _predicted(cost, inliers))
    return CostFit(cost, len(inliers), statistics.median(_errors(cost, inliers)))


def _solve(samples: Sequence[StepSample], scales: Sequence[float]) -> StepCost:
    """Return the least squares of the errors divided by `scales`, with no negative coefficient."""
    import numpy as np
    from scipy.optimize import nnls

    weights = 1 / np.array(scales)
    parts = np.array([_amounts(sample) for sample in samples])
    wanted = np.array([s.seconds for s in samples])
    return StepCost(*map(float, nnls(parts * weights[:, None], wanted * weights)[0]))


def _amounts(sample: StepSample) -> tuple[float, ...]:
    """Return what each coefficient of `StepCost` is multiplied with, in their order."""
    return (
        1.0,
        sample.prefill_tokens,
        sample.decode_rows,
        sample.context_tokens,
        float(sample.prefill_tokens > 0),
        sample.attended,
    )


def _predicted(cost: StepCost, samples: Sequence[StepSample]) -> list[float]:
    """Return the predicted time of each step, with a lower bound."""
    least = 0.1 * statistics.median(sample.seconds for sample in samples)
    return [
        max(least, cost(s.prefill_tokens, s.decode_rows, s.context_tokens, s.attended))
        for s in samples
    ]


def _errors(cost: StepCost, samples: Sequence[StepSample]) -> list[float]:
    predicted = _predicted(cost, samples)
    return [
        abs(s.seconds - seconds) / seconds for s, seconds in zip(samples, predicted, strict=True)
    ]
