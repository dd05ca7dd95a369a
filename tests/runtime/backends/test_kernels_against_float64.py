"""Every kernel against the exact product in float64: all widths, ragged rows, odd shapes, any zero points."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from tiny_models import random_weight

from compress.checkpoint.scale_search import quantize_tokens
from compress.checkpoint.weights import Activations, Int
from runtime.backends.base import Target
from runtime.backends.registry import DEQUANTIZED
from runtime.backends.torch import quantized_linear
from runtime.backends.torch.quantized_linear import INT4PACK, INT8_DYNAMIC, REFERENCE

CPU = torch.device("cpu")
BF16 = Target(CPU, torch.bfloat16)
needs_int4pack = pytest.mark.skipif(bool(INT4PACK.unsupported_reason(Int(), 128, BF16)), reason="no AVX2")
needs_int8 = pytest.mark.skipif(
    bool(INT8_DYNAMIC.unsupported_reason(Int(8, None, True, Activations.INT8), 128, BF16)), reason="no VNNI"
)


def activations(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, mean: float = 0.0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) + mean).to(dtype)


def exact(x, weight, bias=None):
    y = x.double() @ weight.dequantize(torch.float64).T
    return y if bias is None else y + bias.double()


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_torch_kernels(bits, group_size, symmetric, dtype):
    weight = random_weight((44, 96), Int(bits, group_size, symmetric), dtype=torch.float16)
    bias = activations(1, 44, dtype)[0]
    x = activations(5, 96, dtype)
    bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    for kernel in (REFERENCE, DEQUANTIZED):
        found = kernel.prepare(weight, bias, Target(CPU, dtype))(x)
        assert found.dtype == dtype
        assert relative_error(found, exact(x, weight, bias)) < bound


def test_reference_dequantizes_a_panel_at_a_time(monkeypatch):
    weight = random_weight((50, 64), Int(3, 32))
    x = activations(4, 64, torch.float64)
    monkeypatch.setattr(quantized_linear, "PANEL_ELEMENTS", 64 * 7)
    linear = REFERENCE.prepare(weight, None, Target(CPU, torch.float64))
    assert len(linear.panels) == 8
    torch.testing.assert_close(linear(x), exact(x, weight), rtol=0, atol=1e-13)


@needs_int4pack
@examples(60)
@given(
    bits=st.sampled_from([2, 3, 4]),
    symmetric=st.booleans(),
    group_size=st.sampled_from([32, 64, 96, 128, None]),
    groups=st.integers(1, 3),
    out_features=st.integers(1, 150),
    rows=st.integers(1, 33),
    seed=st.integers(0, 9),
)
def test_int4pack_rounds_no_more_than_bfloat16(bits, symmetric, group_size, groups, out_features, rows, seed):
    """The result is rounded once, and (8 - zero point) * scale once: 2^-8 of each at most."""
    weight = random_weight((out_features, (group_size or 160) * groups), Int(bits, group_size, symmetric), seed)
    x = activations(rows, weight.shape[1])
    found = INT4PACK.prepare(weight, None, BF16)(x)
    assert found.shape == (rows, out_features)
    offsets = weight.scales.double().abs().repeat_interleave(weight.shape[1] // weight.scales.shape[1], 1) * 8
    magnitude = x.double().abs() @ (weight.dequantize(torch.float64).abs() + (0 if symmetric else offsets)).T
    assert ((found.double() - exact(x, weight)).abs() <= 1.01 * 2**-8 * magnitude).all()


@needs_int4pack
@pytest.mark.parametrize("rows", [1, 8, 33, quantized_linear.MAX_DIRECT_ROWS + 1, 200])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_int4pack_error_figures(rows, bits):
    """Symmetric codes with bfloat16 scales: only the rounding of the result (about 1.7e-3), as long as the packed
    product serves; panels of bfloat16 weights add as much again, and so do the rounded zero points."""
    symmetric = random_weight((200, 1024), Int(bits, 128))
    asymmetric = random_weight((200, 1024), Int(bits, 128, symmetric=False))
    for weight, mean, bound in ((symmetric, 0.0, 1.9e-3), (asymmetric, 0.0, 2.7e-3), (asymmetric, 1.0, 2.7e-3)):
        x = activations(rows, 1024, mean=mean)
        bias = activations(1, 200)[0]
        linear = INT4PACK.prepare(weight, None, BF16)
        error = relative_error(linear(x), exact(x, weight))
        assert error < (bound if rows <= quantized_linear.MAX_DIRECT_ROWS else 2.7e-3)
        with_bias = INT4PACK.prepare(weight, bias, BF16)(x)
        assert relative_error(with_bias, exact(x, weight, bias)) < 3.5e-3


@needs_int4pack
def test_int4pack_float16_scales_cost_what_bfloat16_weights_cost():
    weight = random_weight((256, 1024), Int(4, 128, symmetric=False), dtype=torch.float16)
    x = activations(8, 1024)
    packed = relative_error(INT4PACK.prepare(weight, None, BF16)(x), exact(x, weight))
    rounded = relative_error(REFERENCE.prepare(weight, None, BF16)(x), exact(x, weight))
    assert packed < 1.5 * rounded < 4e-3


@needs_int4pack
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_int4pack_panels_are_the_dequantized_weight(bits, symmetric, monkeypatch):
    monkeypatch.setattr(quantized_linear, "PANEL_COLUMNS", 64)
    weight = random_weight((150, 256), Int(bits, 64, symmetric))
    linear = INT4PACK.prepare(weight, None, BF16)
    assert quantized_linear.tile_columns() in (32, 64)
    panel = torch.cat([linear._panel(start, start + 64) for start in (0, 64, 128)], 1)
    assert torch.equal(panel[:, :150].T, weight.dequantize(torch.bfloat16))


@needs_int4pack
def test_int4pack_every_code_value():
    """Identity activations read the weights back: all sixteen codes, exactly."""
    codes = torch.arange(64 * 128).view(64, 128).remainder(16).to(torch.uint8)
    base = random_weight((64, 128), Int(4, 128))
    weight = replace(base, qweight=codes)
    linear = INT4PACK.prepare(weight, None, BF16)
    found = torch.cat([linear(rows) for rows in torch.eye(128, dtype=torch.bfloat16).split(16)])
    assert torch.equal(found.T, weight.dequantize(torch.bfloat16))


@needs_int8
@examples(40)
@given(
    bits=st.sampled_from([4, 8]),
    out_features=st.integers(1, 100),
    in_features=st.integers(1, 200),
    rows=st.integers(1, 33),
    seed=st.integers(0, 9),
)
def test_int8_dynamic_is_the_exact_integer_product(bits, out_features, in_features, rows, seed):
    weight = random_weight((out_features, in_features), Int(bits, None, True, Activations.INT8), seed)
    x, bias = activations(rows, in_features, torch.float32), activations(1, out_features, torch.float32)[0]
    expected = REFERENCE.prepare(weight, bias.double(), Target(CPU, torch.float64))(x.double())
    found = INT8_DYNAMIC.prepare(weight, bias, Target(CPU, torch.float32))(x)
    scale = quantize_tokens(x)[1].double() * weight.scales[:, 0].double().abs() * 127
    # A level may fall on the other side of .5 in float32: one step of one input of a row at most, in practice.
    assert ((found.double() - expected).abs() <= 2 * scale + 1e-5).all()
    assert ((found.double() - expected).abs() <= 1e-4).float().mean() > 0.9


@needs_int8
def test_int8_dynamic_rows_do_not_know_each_other():
    weight = random_weight((48, 128), Int(8, None, True, Activations.INT8))
    linear = INT8_DYNAMIC.prepare(weight, None, BF16)
    x = activations(5, 128)
    alone = linear(x[:1])
    x[1:] *= 1000
    x[4] = float("nan")
    together = linear(x)
    assert torch.equal(together[:1], alone)
    assert together[:4].isfinite().all()
    assert not together[4].isfinite().any()


def test_activation_levels_and_scales():
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.54, 0.5], [-1e-30, 1e-30, 0.0]])
    levels, scale = quantize_tokens(x)
    assert levels.tolist() == [[0, 0, 0], [50, -127, 25], [-127, 127, 0]]
    torch.testing.assert_close(scale[:2, 0], torch.tensor([0.0, 0.02]))
