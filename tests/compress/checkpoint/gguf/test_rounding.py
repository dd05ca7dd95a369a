"""Rounding to block types: errors against the rounding of `gguf`, ends of the range, and bytes that it dequantizes."""

import numpy as np
import pytest
import torch

from compress.checkpoint.gguf.exact import exact_blocks, exact_type
from compress.checkpoint.gguf.rounding import round_to
from compress.checkpoint.gguf.types import dequantize
from compress.checkpoint.gguf.types.base import BLOCK_TYPES
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import NumericsError

gguf = pytest.importorskip("gguf")

BOUNDS = {
    "q4_0": 0.083,
    "q4_1": 0.073,
    "q5_0": 0.041,
    "q5_1": 0.036,
    "q8_0": 0.0050,
    "q2_k": 0.27,
    "q3_k": 0.15,
    "q4_k": 0.073,
    "q5_k": 0.036,
    "q6_k": 0.018,
    "iq4_nl": 0.075,
}
"""Relative errors on normal values, a little above those that the search reaches."""


def normal_rows(columns: int = 512, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02


def relative_error(found: torch.Tensor, values: torch.Tensor) -> float:
    return float((found - values).norm() / values.norm())


@pytest.mark.parametrize("name", BOUNDS)
def test_errors_are_small_and_gguf_finds_the_same_values(name):
    values = normal_rows()
    blocks = round_to(values, name)
    found = dequantize(blocks, BLOCK_TYPES[name])
    theirs = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(found.numpy(), theirs)
    assert relative_error(found, values) < BOUNDS[name]


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_errors_are_below_those_of_gguf(name):
    values, kind = normal_rows(), gguf.GGMLQuantizationType[name.upper()]
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind))
    ours = dequantize(round_to(values, name), BLOCK_TYPES[name])
    assert relative_error(ours, values) < 0.97 * relative_error(theirs, values)


@pytest.mark.parametrize("name", BOUNDS)
def test_zeros_constants_and_single_values(name):
    values = torch.zeros(6, 256)
    values[1, 7], values[2], values[3], values[4, ::2], values[5, 9] = 3.0, 0.5, -0.5, -1.0, 1e-9
    found = dequantize(round_to(values, name), BLOCK_TYPES[name])
    assert found.isfinite().all()
    assert torch.equal(found[0], values[0])
    assert float((found - values).abs().max()) < 0.06


@pytest.mark.parametrize("name", BOUNDS)
def test_large_values_stay_finite_and_nan_is_refused(name):
    values = normal_rows(256, 2) * 1e9
    assert dequantize(round_to(values, name), BLOCK_TYPES[name]).isfinite().all()
    values[1, 3] = float("nan")
    with pytest.raises(NumericsError, match=name):
        round_to(values, name)


def random_codes(scheme: Int, dtype: torch.dtype = torch.bfloat16) -> CodedWeight:
    generator = torch.Generator().manual_seed(1)
    groups = (8, scheme.num_groups(256))
    zero = torch.full(groups, scheme.zero, dtype=torch.uint8)
    if not scheme.symmetric:
        zero = torch.randint(0, scheme.max_code + 1, groups, generator=generator).to(torch.uint8)
    codes = torch.randint(0, scheme.max_code + 1, (8, 256), generator=generator).to(torch.uint8)
    return scheme.weight(codes, (torch.rand(groups, generator=generator) * 0.01).to(dtype), zero)


EXACT = {
    Int(4, 32): "q4_0",
    Int(4, 128): "q4_0",
    Int(4, None): "q4_0",
    Int(3, 64): "q4_0",
    Int(5, 32): "q5_0",
    Int(6, 64): "q8_0",
    Int(8, 32): "q8_0",
}


@pytest.mark.parametrize("scheme", EXACT, ids=str)
def test_symmetric_codes_keep_their_values(scheme):
    weight = random_codes(scheme)
    name = exact_type(weight)
    assert name == EXACT[scheme]
    assert torch.equal(dequantize(exact_blocks(weight, name), BLOCK_TYPES[name]), weight.dequantize())


@pytest.mark.parametrize(("scheme", "name"), [(Int(4, 32, False), "q4_1"), (Int(5, 64, False), "q5_1")], ids=str)
def test_asymmetric_codes_are_kept_and_minima_rounded(scheme, name):
    weight = random_codes(scheme)
    assert exact_type(weight) == name
    found, exact = dequantize(exact_blocks(weight, name), BLOCK_TYPES[name]), weight.dequantize(torch.float64)
    minima = (weight.zero_points * weight.scales.double()).repeat_interleave(256 // weight.scales.shape[1], 1)
    assert ((found - exact).abs() <= minima * 2.0**-11 + 1e-7).all()


@pytest.mark.parametrize("scheme", [Int(4, 16), Int(8, 32, False), Int(6, 32, False)], ids=str)
def test_other_codes_have_no_type(scheme):
    assert exact_type(random_codes(scheme)) is None


def test_scales_that_float16_does_not_hold_have_no_type():
    assert exact_type(random_codes(Int(4, 32), torch.float32)) is None
