"""Kernels of torch for CPUs that have no public name: the only private members of a library in this package.

docs/internals/decisions/private-torch-kernels.md has the measurement of what the public ones cost. A torch without
one of them raises AttributeError, and `linear.can_pack` falls back to a plain product.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def reorder_weight(weight: Tensor, rows: int) -> Tensor:
    """Return a weight [outputs, inputs] in oneDNN's layout, chosen for products of `rows` rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # noqa: SLF001
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with a reordered weight."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
    return product


def linear_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with a reordered weight, added to `residual`."""
    fused: Any = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001
    product: Tensor = fused(x, residual, weight, bias, "add")
    return product


def int8_product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return the product of bfloat16 rows with a weight in 8-bit integers and one scale per output."""
    return torch._weight_int8pack_mm(x, weight, scales)  # noqa: SLF001


def without_overrides() -> AbstractContextManager[None]:
    """Return a context in which torch looks for no override of operators, which takes longer than a small product."""
    context: Any = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001
    manager: AbstractContextManager[None] = context()
    return manager
