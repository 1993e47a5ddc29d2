from typing import Any

import pytest
import torch
from torch.nn import functional

from model_workers.engine.forward import linear as linears
from model_workers.engine.forward.linear import (
    INT8_ROWS,
    Fp8Linear,
    HalfLinear,
    Int8Linear,
    Linear,
    PackedLinear,
    can_pack,
    fits_half,
    make_linear,
)

SIZES = ((64, 48), (48, 1536), (97, 32))


def stored(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random weights of a checkpoint of that type, in float32."""
    return torch.randn(*sizes).to(dtype).float()


def test_this_torch_packs() -> None:
    assert can_pack(HalfLinear)
    assert can_pack(PackedLinear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_stay_in_16_bits(dtype: torch.dtype) -> None:
    assert type(make_linear(stored(64, 512, dtype=dtype))) is HalfLinear
    assert type(make_linear(torch.zeros(8, 8))) is HalfLinear
    assert type(make_linear(stored(8, 8), decodes=False)) is PackedLinear, "of whole texts"


def test_bfloat16_is_packed_where_the_processor_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_instructions(weight: torch.Tensor, rows: int) -> Any:
        if weight.dtype is torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support avx512bw")
        return reorder(weight, rows)

    weight = stored(8, 8).bfloat16()
    kind = PackedLinear if can_pack(PackedLinear, torch.bfloat16) else Linear
    assert type(make_linear(weight)) is kind
    reorder: Any = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", without_instructions)
    can_pack.cache_clear()
    try:
        assert type(make_linear(weight)) is Linear
        assert type(make_linear(torch.randn(8, 8))) is PackedLinear
    finally:
        monkeypatch.undo()
        can_pack.cache_clear()


def test_weights_of_32_bits_stay_in_32_bits() -> None:
    assert type(make_linear(torch.randn(8, 8))) is PackedLinear
    broken = stored(8, 8)
    broken[0, 0] = torch.nan
    assert not fits_half(broken)
    one_more_bit = torch.ones(8, 8)
    one_more_bit[3, 3] += 2**-11
    assert not fits_half(one_more_bit)


def test_what_16_bits_lose_no_float32_sum_would_keep() -> None:
    weight = torch.tensor([[1.0, (1 + 2**-7) * 2**-37]])
    assert fits_half(weight)
    found = HalfLinear(weight, None)(torch.eye(2))[:, 0]
    assert found[0] == 1
    assert (found[1] - weight[0, 1]).abs() <= 2**-39


@pytest.mark.parametrize("size", [2.0**-90, 1.0, 2.0**90])
def test_weights_of_any_size_come_out_as_they_are(size: float) -> None:
    weight = stored(48, 32) * size
    assert torch.equal(HalfLinear(weight, None)(torch.eye(32)).T, weight)


@pytest.mark.parametrize(
    ("library", "name", "kinds"),
    [
        (torch.ops.quantized, "linear_prepack_fp16", (PackedLinear, PackedLinear)),
        (torch.ops.mkldnn, "_reorder_linear_weight", (HalfLinear, Linear)),
    ],
)
def test_a_torch_that_cannot_pack_computes_another_product(
    library: Any, name: str, kinds: tuple[type[Linear], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise AttributeError

    monkeypatch.setattr(library, name, missing)
    can_pack.cache_clear()
    try:
        assert tuple(type(make_linear(w)) for w in (stored(8, 8), torch.randn(8, 8))) == kinds
    finally:
        monkeypatch.undo()
        can_pack.cache_clear()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [Linear, PackedLinear, HalfLinear])
def test_computes_the_product(kind: type[Linear], sizes: tuple[int, int], biased: bool) -> None:
    weight, bias = stored(*sizes), torch.randn(sizes[0]) if biased else None
    linear = kind(weight, bias)
    for rows in (1, 2, 33):
        x, residual = torch.randn(rows, sizes[1]), torch.randn(rows, sizes[0])
        expected = functional.linear(x, weight, bias)
        torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            linear.add(x, residual), expected + residual, atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(linear(x[None])[0], expected, atol=1e-4, rtol=1e-4)
    assert linear(torch.empty(0, sizes[1])).shape == (0, sizes[0])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [Linear, PackedLinear, HalfLinear, Fp8Linear])
def test_halves_are_those_of_the_product(kind: type[Linear], biased: bool) -> None:
    linear = kind(torch.randn(64, 48), torch.randn(64) if biased else None)
    for rows in (1, 2, 33):
        x = torch.randn(rows, 48)
        halves = linear.halves(x)
        torch.testing.assert_close(torch.cat(halves, -1), linear(x), atol=1e-4, rtol=1e-4)
        if kind is Linear and not biased:
            assert all(half.is_contiguous() for half in halves)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", [PackedLinear, HalfLinear])
@pytest.mark.parametrize("multiple", [linears.row_multiple(), 3])
def test_a_row_alone_is_computed_as_among_others_to_the_last_bit(
    kind: type[Linear], sizes: tuple[int, int], multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "row_multiple", lambda: multiple)
    linear = kind(stored(*sizes), None)
    x, residual = torch.randn(70, sizes[1]), torch.randn(70, sizes[0])
    all_rows, added = linear(x), linear.add(x, residual)
    for rows in (1, 2, 3, 7, 16, 32, 33):
        assert torch.equal(linear(x[:rows]), all_rows[:rows])
        assert torch.equal(linear(x[None, :rows]), all_rows[None, :rows])
        assert torch.equal(linear.add(x[:rows], residual[:rows]), added[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, INT8_ROWS, INT8_ROWS + 1])
def test_eight_bits_are_close(dtype: torch.dtype, rows: int) -> None:
    weight, bias = torch.randn(64, 96).to(dtype), torch.randn(64).to(dtype)
    linear, x = Int8Linear(weight, bias), torch.randn(rows, 96).to(dtype)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    # Half a step of 1/127 of the largest weight, 96 times, in a random walk; bfloat16 adds its own.
    allowed = 0.5 * weight.abs().max().item() / 127 * 96**0.5 * 5 + 0.02 * exact.abs().max().item()
    assert (linear(x).double() - exact).abs().max().item() < allowed
    assert linear.weight.dtype is torch.int8
    torch.testing.assert_close(linear(x[None])[0], linear(x))


def test_a_row_of_zeros_stays_zero_in_eight_bits() -> None:
    linear = Int8Linear(torch.zeros(4, 8), None)
    assert not linear(torch.randn(3, 8)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_eight_bit_floats_are_close(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(48, 64) * torch.logspace(-3, 3, 48)[:, None]).to(dtype)
    bias = torch.randn(48, dtype=dtype) if biased else None
    linear = make_linear(weight, bias, "fp8")
    assert type(linear) is Fp8Linear
    assert linear.weight.nbytes == weight.numel()
    x = (torch.randn(2, 9, 64) * torch.logspace(-3, 3, 9)[:, None]).to(dtype)
    x[0, 0] = 0
    expected, found = functional.linear(x, weight, bias).float(), linear(x)
    assert found.dtype is dtype
    assert not found[0, 0].count_nonzero() or biased
    # Weight and input are off by a sixteenth at most, whatever their size: each row and output has a scale of its own.
    most = 0.13 * (x.float().abs() @ weight.float().abs().T) + 0.01 * expected.abs()
    assert ((found - expected).abs() <= most).all()


def test_sizes_that_the_kernel_does_not_take_stay_wide() -> None:
    assert type(make_linear(torch.randn(97, 32), None, "fp8")) is PackedLinear
