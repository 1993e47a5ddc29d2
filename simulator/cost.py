"""Duration of an engine's step as a linear function of its work.

    seconds = base_s + prefill_token_s * prefill_tokens + decode_row_s * decode_rows
        + context_token_s * context_tokens + (prefill_s if prefill_tokens) + attended_s * attended

`attended` counts, for each computed prompt token, the tokens before it that it attends to. Costs
are fitted to measured steps, which `simulator/measured.py` reads from a file.
"""

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
    import numpy as np
    from scipy.optimize import nnls

    if len(samples) < SAMPLES_MIN or not any(sample.decode_rows for sample in samples):
        raise SimulationError(
            f"{len(samples)} steps were measured: a cost needs {SAMPLES_MIN}, with decoding ones"
        )
    amounts = np.array([_amounts(sample) for sample in samples])
    measured = np.array([sample.seconds for sample in samples])
    predicted, is_kept = np.ones(len(samples)), np.ones(len(samples), dtype=bool)
    # Absolute errors give a first prediction, to which the errors are then relative. Each solution
    # predicts better, and so weighs the errors of the next one better.
    for iteration in range(2 + REWEIGHTINGS):
        weighted = amounts[is_kept] / predicted[is_kept, None]
        solution, _ = nnls(weighted, measured[is_kept] / predicted[is_kept])
        predicted = np.maximum(0.1 * np.median(measured), amounts @ solution)
        errors = np.abs(measured - predicted) / predicted
        if iteration == 1:
            is_kept = errors <= OUTLIER * np.median(errors)
    error = float(np.median(errors[is_kept]))
    return CostFit(StepCost(*map(float, solution)), int(is_kept.sum()), error)


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
