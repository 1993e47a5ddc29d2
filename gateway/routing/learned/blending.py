"""How much each part of a head counts, from what the parts said about rows they had not seen."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.head import Blend

Matrix = NDArray[np.float64]

SHRINK: Final = 100.0
"""In rows: keeps parts that say much the same side by side."""
_SPREAD_MIN: Final = 1e-6


def weigh(said: Matrix, labels: Matrix, weights: Matrix) -> Blend:
    """The blend of ``said`` [parts, rows, 2] that comes nearest to the gains of ``labels`` [rows, 2].

    Least squares with no share below zero; equal parts where no part says anything.
    """
    gains = (said[:, :, 1] - said[:, :, 0]).T
    gains = gains - np.average(gains, axis=0, weights=weights)
    spread = np.maximum(gains.std(axis=0), _SPREAD_MIN)
    gain = labels[:, 1] - labels[:, 0]
    gain = gain - np.average(gain, weights=weights)
    scaled = gains / spread
    worth = _not_negative((scaled.T * weights) @ scaled, (scaled.T * weights) @ gain)
    if not worth.any():
        worth = np.ones(len(spread))
    shares = worth / spread
    return Blend(*(shares / shares.sum()).tolist())


def _not_negative(squares: Matrix, products: Matrix) -> Matrix:
    """Ridge regression; what would count against the rest is left out, the worst first."""
    worth = np.zeros(len(products))
    kept = np.arange(len(products))
    while len(kept):
        shrunk = squares[np.ix_(kept, kept)] + SHRINK * np.eye(len(kept))
        found = np.linalg.solve(shrunk, products[kept])
        if found.min() >= 0:
            worth[kept] = found
            break
        kept = np.delete(kept, found.argmin())
    return worth
