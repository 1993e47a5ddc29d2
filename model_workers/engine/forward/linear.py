"""Linear layers: plain, packed for CPUs, and quantized to 8-bit integers or floats.

On a CPU the weight is laid out once, at load, and a row's result does not depend on how many rows are computed with it
(docs/internals/decisions/engine-numerics.md). In float32 FBGEMM multiplies a weight in 16-bit floats, if these hold it
exactly; other weights are laid out for oneDNN, by the operators of torch's own compiler. A torch without either
computes a plain product, and so does bfloat16 on a processor without the instructions that oneDNN needs.
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from model_workers.engine.forward import torch_kernels

HALF_EXPONENT: Final = 15
"""Weights in 16 bits are scaled so that the largest is below two to this power."""
HALF_ERROR: Final = 2.0**-25
"""Maximum loss of scaled weights that 16 bits cannot hold: 2**-39 of the largest weight."""
ROWS_TRIED: Final = 120
"""Number of rows to try: FBGEMM takes this many at a time, so that further groups are the same again."""
LAYOUT_ROWS: Final = 32
"""Number of rows that the layout is chosen for; it holds for any number."""
INT8_MAX: Final = 127
FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = torch.finfo(FP8).max
FP8_MULTIPLE: Final = 16
"""Inputs and outputs of the kernels for 8-bit floats are multiples of this."""
FP8_CAPABILITY: Final = (8, 9)
"""Minimum compute capability of CUDA devices that multiply 8-bit floats: Ada, Hopper, and newer."""
INT8_ROWS: Final = 8
"""Maximum number of rows for which torch's 8-bit product is faster than a plain one with a widened weight."""


class Linear(nn.Module):
    """A plain product: `x @ weight.T + bias`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., outputs] from [..., inputs]."""
        return functional.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the product added to `residual` [..., outputs]."""
        return residual + self.forward(x)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second half of the outputs."""
        if type(self) is not Linear or self.bias is not None:
            first, second = self.forward(x).chunk(2, -1)
        else:
            # Two products in one call: each half lies in one piece, which a GPU goes through twice as fast.
            weights = self.weight.view(2, -1, self.weight.shape[-1])
            first, second = torch.matmul(x, weights.transpose(1, 2)).unbind(0)
        return first, second


class PackedLinear(Linear):
    """A linear layer on a CPU, with the weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        packed = torch_kernels.reorder_weight(weight.detach().contiguous(), LAYOUT_ROWS)
        super().__init__(packed, bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if _is_alone(x):
            return self.forward(_doubled(x))[..., :1, :]
        return torch_kernels.linear(x, self.weight, self.bias)

    @override
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if _is_alone(x):
            return self.add(_doubled(x), _doubled(residual))[..., :1, :]
        return torch_kernels.linear_add(x, residual, self.weight, self.bias)


class HalfLinear(Linear):
    """A linear layer on a CPU in float32, with the weight in 16-bit floats that are widened in the product's registers.

    A product of one row takes as long as reading the weight, which is half of float32's. The numbers are those of
    float32: only a weight that `fits_half` is stored like this. A row is summed in the same order among any number of
    rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Nobody reads the weight; transformers asks for its type.
        super().__init__(weight.new_empty(0), bias)
        scale = _half_scale(weight)
        bias = None if bias is None else bias.detach() * scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach() * scale, bias)
        self._scale = scale
        self._multiple = row_multiple()
        # torch multiplies by a number of Python in three times the time.
        self._unscale = torch.tensor(1 / scale)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(x).mul_(self._unscale)

    @override
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.add(residual, self._scaled(x), alpha=1 / self._scale)

    def _scaled(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if more := -rows % self._multiple:
            flat = functional.pad(x.reshape(rows, -1), (0, 0, 0, more))
            return self._scaled(flat)[:rows].view(*x.shape[:-1], -1)
        # Else torch looks in `_packed` for an override of the operator, which takes longer than a small product.
        with torch_kernels.without_overrides():
            product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


@cache
def row_multiple() -> int:
    """Return the number of rows, or a multiple of it, that FBGEMM gets at a time; tried once.

    With AVX2 it sums one or two rows in another order than three to six, and divides others into such groups; multiples
    of three have no group of one or two. With AVX-512 all are equal.

    Raises:
        RuntimeError: Rows differ all the same.
    """
    numbers = torch.Generator().manual_seed(1)
    packed = torch.ops.quantized.linear_prepack_fp16(torch.randn(16, 64, generator=numbers), None)
    product = torch.ops.quantized.linear_dynamic_fp16
    x = torch.randn(ROWS_TRIED, 64, generator=numbers)
    together = product(x, packed)
    for multiple in (1, 3):
        counts = range(multiple, ROWS_TRIED, multiple)
        if all(torch.equal(product(x[:rows], packed), together[:rows]) for rows in counts):
            return multiple
    raise RuntimeError("rows differ with their number")


def fits_half(weight: Tensor) -> bool:
    """Return whether 16-bit floats hold a float32 weight, as they do for checkpoints in 16 bits of either kind.

    Numbers that are too small for them lose what any float32 sum with the largest one loses anyway.
    """
    scaled = weight.detach() * _half_scale(weight)
    return bool(((scaled.half().float() - scaled).abs() <= HALF_ERROR).all())


def _half_scale(weight: Tensor) -> float:
    """Return a power of two as scale, so that nothing is rounded."""
    largest = weight.detach().abs().max()
    return float(2.0 ** (HALF_EXPONENT - int(torch.frexp(largest).exponent)))


class Int8Linear(Linear):
    """A linear layer with the weight in 8-bit integers and one scale per output: a quarter of float32's memory.

    Few rows in bfloat16 on a CPU are multiplied with the integers themselves; else the weight is widened for the
    duration of the product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        largest = weight.detach().float().abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
        scales = largest / INT8_MAX
        super().__init__((weight.detach() / scales[:, None]).round_().to(torch.int8), bias)
        self.scales = scales.to(weight.dtype)
        self._has_kernel = weight.device.type == "cpu" and weight.dtype is torch.bfloat16

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self._has_kernel and x.numel() <= x.shape[-1] * INT8_ROWS:
            flat = x.reshape(-1, x.shape[-1])
            product = torch_kernels.int8_product(flat, self.weight, self.scales)
            product = product.view(*x.shape[:-1], -1)
        else:
            product = functional.linear(x, self.weight.to(x.dtype)).mul_(self.scales)
        return product if self.bias is None else product.add_(self.bias)


class Fp8Linear(Linear):
    """A linear layer with the weight in 8-bit floats (e4m3) and one scale per output, multiplied as such.

    Each row of the input is rounded to 8 bits too, with its own scale. Numbers and kernel are those of torchao's
    `Float8DynamicActivationFloat8WeightConfig` with `PerRow`; docs/internals/decisions/engine-numerics.md says why
    torchao is not used.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded, scales = _in_fp8(weight.detach())
        super().__init__(rounded, bias)
        self.scales = scales.T.contiguous()

    @override
    def forward(self, x: Tensor) -> Tensor:
        rows, scales = _in_fp8(x.reshape(-1, x.shape[-1]))
        if x.is_cuda:
            by_row = functional.ScalingType.RowWise
            product = functional.scaled_mm(
                *(rows, self.weight.T, scales, by_row, self.scales, by_row),
                output_dtype=torch.bfloat16,  # the kernel gives nothing else
            )
        else:
            product = functional.linear(rows.to(x.dtype), self.weight.to(x.dtype))
            product = product * scales * self.scales
        product = product.to(x.dtype).view(*x.shape[:-1], -1)
        return product if self.bias is None else product.add_(self.bias)


def _in_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in 8 bits, and the scale of each, [rows, 1]."""
    largest = rows.abs().amax(1, keepdim=True).float()
    scales = largest.clamp_min(torch.finfo(torch.float32).tiny * FP8_MAX) / FP8_MAX
    # What rounding takes above the largest number would become NaN.
    return (rows / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def make_linear(
    weight: Tensor, bias: Tensor | None = None, quantization: str = "none", *, decodes: bool = True
) -> Linear:
    """Return the fastest layer for a weight [outputs, inputs] on its device, quantized to "int8", "fp8" or "none".

    Args:
        weight: The weight.
        bias: The bias, if any.
        quantization: Number format of the weight. "fp8" is ignored if a size is no multiple of `FP8_MULTIPLE`.
        decodes: Whether most products are of the few rows that decode, not of whole texts.
    """
    if quantization == "int8":
        return Int8Linear(weight, bias)
    if quantization == "fp8" and not any(size % FP8_MULTIPLE for size in weight.shape):
        return Fp8Linear(weight, bias)
    if weight.device.type == "cpu":
        return _packed(weight, bias, decodes)
    return Linear(weight.detach(), bias)


def _packed(weight: Tensor, bias: Tensor | None, decodes: bool) -> Linear:
    is_wide = decodes and weight.dtype is torch.float32
    if is_wide and can_pack(HalfLinear) and fits_half(weight):
        return HalfLinear(weight, bias)
    return (PackedLinear if can_pack(PackedLinear, weight.dtype) else Linear)(weight.detach(), bias)


@cache
def can_pack(kind: type[Linear], dtype: torch.dtype = torch.float32) -> bool:
    """Return whether this torch and this processor support a kind of layer; tried once."""
    ones = torch.ones(2, 16, dtype=dtype)
    try:
        return torch.equal(kind(torch.eye(16, dtype=dtype), None)(ones), ones)
    except (AttributeError, RuntimeError):
        return False


def _is_alone(x: Tensor) -> bool:
    """Return whether `x` has one row. oneDNN sums it in another order than among others, so callers double it."""
    return x.numel() == x.shape[-1]


def _doubled(x: Tensor) -> Tensor:
    return torch.cat((x, x), -2)
