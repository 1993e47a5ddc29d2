"""The time of an engine's step as a linear function of its work.

    seconds = base_s + prefill_token_s * prefill_tokens + decode_row_s * decode_rows
        + context_token_s * context_tokens + (prefill_s if prefill_tokens) + attended_s * attended

``attended`` counts, for each computed token of a prompt, the tokens before it that it attends to.

Fitted from measured steps, which `simulator/measured.py` reads from a file.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.trace import SimulationError

SAMPLES_MIN: Final = 8
REWEIGHTINGS: Final = 3
OUTLIER: Final = 5.0
"""A step this many times further off than the median one was disturbed by something else, and is left out."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds; see above."""

    base_s: float
    prefill_token_s: float
    decode_row_s: float
    context_token_s: float
    prefill_s: float = 0.0
    """Seconds more of a step that computes any prompt: engines take another pass over the model for it."""
    attended_s: float = 0.0

    def __call__(
        self,
        prefill_tokens: float,
        decode_rows: float,
        context_tokens: float,
        attended: float = 0.0,
    ) -> float:
        """Seconds of one step."""
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
    """Median over the samples of the relative error."""


SHIPPED: Final[Mapping[str, StepCost]] = {
    "small-cpu": StepCost(1.6e-3, 1.5e-5, 2.5e-5, 3.0e-7, 4.5e-4),
    "large-cpu": StepCost(2.1e-3, 4.0e-5, 8.5e-5, 4.8e-7, 3.8e-4),
}
"""The shipped tiers on the CPU, see docs/operate/simulation.md for the machine and the command."""


def named_cost(name: str) -> StepCost:
    """One of `SHIPPED`.

    Raises:
        SimulationError: there is none of that name.
    """
    if name not in SHIPPED:
        raise SimulationError(f"no cost {name!r}; there are {', '.join(SHIPPED)}, or give a file")
    return SHIPPED[name]


def fit(samples: Sequence[StepSample]) -> CostFit:
    """The cost with the least squares of the relative errors, none of its parts negative.

    Relative to the predicted time, not to the measured one: else a step whose report came early would count most.

    Raises:
        SimulationError: fewer than `SAMPLES_MIN` steps, or none that decodes.
    """
    if len(samples) < SAMPLES_MIN or not any(sample.decode_rows for sample in samples):
        raise SimulationError(
            f"{len(samples)} steps were measured: a cost needs {SAMPLES_MIN}, with decoding ones"
        )
    cost = _solve(samples, [1.0] * len(samples))
    cost = _solve(samples, _said(cost, samples))
    errors = _errors(cost, samples)
    bound = OUTLIER * statistics.median(errors)
    kept = [s for s, error in zip(samples, errors, strict=True) if error <= bound]
    for _ in range(REWEIGHTINGS):
        cost = _solve(kept, _said(cost, kept))
    return CostFit(cost, len(kept), statistics.median(_errors(cost, kept)))


def _solve(samples: Sequence[StepSample], scales: Sequence[float]) -> StepCost:
    """Least squares of the errors over ``scales``, none of the parts negative."""
    import numpy as np
    from scipy.optimize import nnls

    weights = 1 / np.array(scales)
    parts = np.array(
        [
            (
                *(1.0, s.prefill_tokens, s.decode_rows, s.context_tokens),
                *(s.prefill_tokens > 0, s.attended),
            )
            for s in samples
        ]
    )
    wanted = np.array([s.seconds for s in samples])
    return StepCost(*map(float, nnls(parts * weights[:, None], wanted * weights)[0]))


def _said(cost: StepCost, samples: Sequence[StepSample]) -> list[float]:
    """The predicted time of each step, with a lower bound."""
    least = 0.1 * statistics.median(sample.seconds for sample in samples)
    return [
        max(least, cost(s.prefill_tokens, s.decode_rows, s.context_tokens, s.attended))
        for s in samples
    ]


def _errors(cost: StepCost, samples: Sequence[StepSample]) -> list[float]:
    said = _said(cost, samples)
    return [abs(s.seconds - seconds) / seconds for s, seconds in zip(samples, said, strict=True)]
