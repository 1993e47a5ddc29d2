"""Trees, walked all at once: one step of every tree is a handful of array operations.

A leaf is its own child, so trees that have ended wait for the deepest. Children lie side by side, so a step needs
no second table: `child[node] + (value > threshold[node])`.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.features import Vector

_THIN_OUT_EVERY: Final = 6
"""Steps after which trees that have ended are left behind."""


@dataclass(frozen=True)
class Forest:
    """Regression trees with two outputs: P(weak right) and P(strong right).

    Numbers of nodes and columns are as wide as numpy's own, which saves a conversion in every step.
    """

    roots: NDArray[np.intp]
    column: NDArray[np.intp]
    """Of each node: the column it looks at."""
    threshold: NDArray[np.float32]
    """Of each node: a value above it goes to the second child; infinite in a leaf."""
    child: NDArray[np.intp]
    """Of each node: its first child, the second lies behind it; a leaf is its own."""
    value: NDArray[np.float32]
    """[nodes, 2]: what a leaf says."""

    def predict(self, row: Vector) -> NDArray[np.float32]:
        """[trees, 2]: what each tree says about ``row``, trees in no order."""
        ended = []
        nodes = self.roots
        while nodes.size:
            for _ in range(_THIN_OUT_EVERY):
                above = row.take(self.column.take(nodes)) > self.threshold.take(nodes)
                nodes = self.child.take(nodes) + above
            in_leaf = self.child.take(nodes) == nodes
            ended.append(nodes[in_leaf])
            nodes = nodes[~in_leaf]
        said: NDArray[np.float32] = self.value.take(np.concatenate(ended), axis=0)
        return said
