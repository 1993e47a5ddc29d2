"""Linear layers as the engine computes them.

On a CPU the weight is laid out for oneDNN once, at load: 1.3 to 2.5 times faster than a plain product, and a row's
result does not depend on how many rows are computed with it (docs/decisions/engine-numerics.md). The operators are
those of torch's own compiler; a torch without them computes a plain product.
"""

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYOUT_ROWS: Final = 32
"""For how many rows the layout is chosen; it holds for any number."""


class Linear(nn.Module):
    """A plain product: ``x @ weight.T + bias``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return functional.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product, added to ``residual`` [..., outputs]."""
        return residual + self.forward(x)


class PackedLinear(Linear):
    """The same on a CPU, the weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), LAYOUT_ROWS)
        super().__init__(packed, bias)

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear.forward`."""
        if _is_alone(x):
            return self.forward(_doubled(x))[..., :1, :]
        return _product(x, self.weight, self.bias, "none", [], "")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Linear.add`."""
        if _is_alone(x):
            return self.add(_doubled(x), _doubled(residual))[..., :1, :]
        return _product_and(x, residual, self.weight, self.bias, "add")


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest layer for a weight [outputs, inputs] where it lies."""
    if weight.device.type == "cpu" and can_pack():
        return PackedLinear(weight, bias)
    return Linear(weight.detach(), bias)


@cache
def can_pack() -> bool:
    """Whether this torch packs weights; tried once."""
    weight, x = torch.eye(16), torch.ones(2, 16)
    try:
        return torch.equal(PackedLinear(weight, None)(x), x)
    except (AttributeError, RuntimeError):
        return False


def _is_alone(x: Tensor) -> bool:
    """A single row would be summed in another order than the same row among others."""
    return x.numel() == x.shape[-1]


def _doubled(x: Tensor) -> Tensor:
    return torch.cat((x, x), -2)


def _product(*arguments: Any) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(*arguments)
    return product


def _product_and(*arguments: Any) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(*arguments)
    return product
