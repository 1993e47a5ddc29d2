"""Logistic regressions over scaled columns, one an output."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.features import Vector

CLIP: Final = 3.0
"""Deviations beyond which a column says no more."""

Matrix = NDArray[np.float64]


def damp(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Counts with long tails, made shorter: sign(x) log(1 + |x|)."""
    damped: NDArray[np.float32] = np.copysign(np.log1p(np.abs(rows)), rows)
    return damped


@dataclass(frozen=True)
class Linear:
    """What the regressions share, and their coefficients."""

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    coefficients: NDArray[np.float32]
    """[columns, outputs]."""
    intercepts: NDArray[np.float32]
    """[outputs]."""

    def predict(self, row: Vector) -> NDArray[np.float32]:
        """[outputs]: chances."""
        scaled = np.minimum(np.maximum((damp(row) - self.mean) / self.scale, -CLIP), CLIP)
        odds = scaled @ self.coefficients + self.intercepts
        probability: NDArray[np.float32] = 1 / (1 + np.exp(-odds))
        return probability
