"""How much each part of a head counts, from what the parts said about rows they had not seen."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.head import Blend

Matrix = NDArray[np.float64]

SHRINK: Final = 30.0
"""Towards equal shares; in rows."""
WORTHWHILE: Final = 0.7
"""A part counts whose correlation with the gains is at least this share of the best one's."""
_SPREAD_MIN: Final = 1e-6


def weigh(said: Matrix, labels: Matrix, weights: Matrix) -> Blend:
    """The blend of ``said`` [parts, rows, 2] that comes nearest to the gains of ``labels`` [rows, 2].

    Least squares with no share below zero, leaning towards equal shares; few rows cannot tell a part that knows little
    from one that knows nothing, so only good ones take part. Equal shares where none knows anything.
    """
    gains = (said[:, :, 1] - said[:, :, 0]).T
    gains = gains - np.average(gains, axis=0, weights=weights)
    spread = np.maximum(np.sqrt(np.average(gains**2, axis=0, weights=weights)), _SPREAD_MIN)
    gain = labels[:, 1] - labels[:, 0]
    gain = gain - np.average(gain, weights=weights)
    scaled = gains / spread
    products = (scaled.T * weights) @ gain
    good = np.flatnonzero((products > 0) & (products >= WORTHWHILE * products.max()))
    worth = np.zeros(len(spread))
    if len(good):
        worth[good] = _least_squares((scaled.T * weights)[good] @ scaled[:, good], products[good])
    else:
        worth[:] = 1
    shares = worth / spread
    return Blend(*(shares / shares.sum()).tolist())


def _least_squares(squares: Matrix, products: Matrix) -> Matrix:
    """Ridge regression towards equal shares; what would count against the rest is left out, the worst first."""
    equal = products.sum() / squares.sum()
    worth = np.zeros(len(products))
    kept = np.arange(len(products))
    while len(kept):
        shrunk = squares[np.ix_(kept, kept)] + SHRINK * np.eye(len(kept))
        found = np.linalg.solve(shrunk, products[kept] + SHRINK * equal)
        if found.min() >= 0:
            worth[kept] = found
            break
        kept = np.delete(kept, found.argmin())
    return worth
