"""Forms of keys and values: what is recorded, and their numbers against a slow float64 reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.checkpoint.kv_cache import KV_FORMATS, KVCacheScheme, stored_kv_cache, wished_kv_cache
from compress.checkpoint.kv_quant import FP8, dequantize_heads, quantize_heads, read_back, rotate_heads
from compress.common.errors import SchemeError

RECORDED = KVCacheScheme("int4", rotate=True, sinks=4)


def test_sizes_count_scales_and_offsets() -> None:
    assert [KVCacheScheme(name).head_bytes(128, 2) for name in KV_FORMATS] == [512, 260, 264, 200, 136]
    assert KVCacheScheme().head_bytes(64, 8) == 2 * 64 * 8


def test_keys_and_values_may_differ() -> None:
    assert [(KVCacheScheme(n).key_format, KVCacheScheme(n).value_format) for n in ("k8v4", "fp8")] == [
        ("int8", "int4"),
        ("fp8", "fp8"),
    ]


def test_what_is_stored_is_read() -> None:
    for scheme in (KVCacheScheme(), KVCacheScheme("fp8"), KVCacheScheme("k8v4", True, 4, 32)):
        assert KVCacheScheme.from_dict(scheme.to_dict()) == scheme
        assert stored_kv_cache({"compression_config": {"kv_cache": scheme.to_dict()}}) == scheme
    assert stored_kv_cache({}) is None
    assert KVCacheScheme.from_dict({"format": "int8"}) == KVCacheScheme("int8")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"format": "int3"}, r"'int3'.*16bit.*fp8"),
        ({"format": "int4", "group": 32}, "'group'"),
        ({"format": "int4", "sinks": -1}, "sinks=-1"),
        ({"format": "int4", "recent": 1.5}, "recent=1.5"),
        ({"format": "int4", "rotate": "yes"}, "rotate='yes'"),
        ({"format": "16bit", "sinks": 4}, "16-bit"),
        ("int4", "^kv_cache .*'int4'"),
    ],
)
def test_refusals_name_what_is_wrong(block: Any, words: str) -> None:
    with pytest.raises(SchemeError, match=words):
        KVCacheScheme.from_dict(block)


def test_wishes_go_before_what_is_recorded() -> None:
    assert wished_kv_cache(None) == KVCacheScheme()
    assert wished_kv_cache(None, "int4") == KVCacheScheme("int4", rotate=True)
    assert wished_kv_cache(RECORDED) == wished_kv_cache(RECORDED, "int4") == RECORDED
    assert wished_kv_cache(RECORDED, "fp8") == KVCacheScheme("fp8")
    assert wished_kv_cache(RECORDED, "16bit") == KVCacheScheme()
    assert wished_kv_cache(RECORDED, residual_length=8) == KVCacheScheme("int4", True, 4, 8)
    assert wished_kv_cache(RECORDED, rotate=False, sinks=0) == KVCacheScheme("int4")
    with pytest.raises(SchemeError, match="16-bit"):
        wished_kv_cache(None, sinks=4)


FORMATS = ("fp8", "int8", "int4")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def slow_integer(head: list[float], bits: int) -> tuple[list[int], float, float]:
    """Codes, scale and offset of one head, number by number."""
    low, high = min(head), max(head)
    scale = float(np.float16((high - low) / (2**bits - 1)))
    offset = float(np.float16(low))
    codes = [min(2**bits - 1, max(0, round((x - offset) / scale))) for x in head]
    return codes, scale, offset


def slow_fp8(head: list[float]) -> tuple[list[float], float]:
    scale = float(np.float16(max(abs(x) for x in head) / 448))
    values = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    values = values[values.isfinite()]
    return [float(values[(values - min(448, max(-448, x / scale))).abs().argmin()]) for x in head], scale


def random_heads(dtype: torch.dtype, head_dim: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(head_dim)
    heads = torch.randn(5, 3, head_dim, generator=generator, dtype=torch.float64) * torch.logspace(-2, 2, 15).view(
        5, 3, 1
    )
    return (heads + 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_integers_are_those_of_the_slow_reference(dtype: torch.dtype, bits: int) -> None:
    heads = random_heads(dtype)
    quantized = quantize_heads(heads, f"int{bits}")
    assert quantized.offset is not None
    for place in np.ndindex(5, 3):
        codes, scale, offset = slow_integer(heads[place].double().tolist(), bits)
        assert quantized.codes[place].tolist() == codes
        assert float(quantized.scale[place]) == scale
        assert float(quantized.offset[place]) == offset
        expected = torch.tensor([code * scale + offset for code in codes], dtype=torch.float64)
        found = dequantize_heads(quantized, dtype)[place].double()
        assert torch.allclose(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_that_of_the_slow_reference(dtype: torch.dtype) -> None:
    heads = random_heads(dtype)
    quantized = quantize_heads(heads, "fp8")
    assert quantized.offset is None
    for place in np.ndindex(5, 3):
        values, scale = slow_fp8(heads[place].double().tolist())
        assert float(quantized.scale[place]) == scale
        # Between two e4m3 numbers both are as good.
        found = quantized.codes[place].view(FP8).double()
        exact = heads[place].double() / scale
        assert torch.allclose(
            (found - exact).abs(), (torch.tensor(values, dtype=torch.float64) - exact).abs(), atol=1e-5
        )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("head_dim", [2, 24, 64, 80, 128])
def test_the_error_is_half_a_step(format: str, head_dim: int) -> None:
    heads = random_heads(torch.float64, head_dim)
    error = (read_back(heads, format) - heads).abs()
    if format == "fp8":
        scale = heads.abs().amax(-1, keepdim=True) / 448
        assert (error <= (heads.abs() * 2**-4).maximum(scale * 2**-9) * 1.01).all()
        return
    span = heads.amax(-1, keepdim=True) - heads.amin(-1, keepdim=True)
    # Half a step, and what rounding scale and offset to float16 may shift at the ends.
    shift = span * 2**-11 + heads.amin(-1, keepdim=True).abs() * 2**-11
    assert (error <= span / (2 ** int(format[3:]) - 1) / 2 + 1.01 * shift).all()


@pytest.mark.parametrize("format", FORMATS)
def test_constants_come_back_but_for_float16(format: str) -> None:
    # Below 448 times half of the smallest float16, a scale is zero.
    for value in (0.0, 1.0, -3.3, 1e-6, 300.0):
        heads = torch.full((2, 16), value, dtype=torch.float64)
        assert torch.allclose(read_back(heads, format), heads, rtol=2**-10, atol=1.4e-5), value
    assert not read_back(torch.zeros(1, 8), format).any()


@pytest.mark.parametrize("format", FORMATS)
def test_huge_values_saturate_and_stay_finite(format: str) -> None:
    heads = torch.tensor([[3e38, -3e38, 0.0, 1.0], [7e4, 6e4, 65504.0, 1.0]])
    back = read_back(heads, format)
    assert back.isfinite().all()
    assert back[0, 0] > 6e4
    assert back[0, 1] < -6e4
    assert torch.allclose(back[1], heads[1], rtol=0.07, atol=3000)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_own_head_only(format: str, bad: float) -> None:
    heads = torch.randn(2, 3, 16)
    expected = read_back(heads, format)
    heads[1, 2, 5] = bad
    back = read_back(heads, format)
    assert not back[1, 2].isfinite().any()
    back[1, 2] = expected[1, 2]
    assert torch.equal(back, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_a_head_does_not_depend_on_others(format: str) -> None:
    heads = random_heads(torch.float32)
    assert torch.equal(read_back(heads, format)[3:4, 1:2], read_back(heads[3:4, 1:2].contiguous(), format))


def test_bytes_of_zero_are_zeros() -> None:
    """Cleared pages must be harmless."""
    for format in FORMATS:
        quantized = quantize_heads(torch.randn(1, 8), format)
        for part in (quantized.codes, quantized.scale, quantized.offset):
            if part is not None:
                part.zero_()
        assert not dequantize_heads(quantized, torch.float32).any()


@pytest.mark.parametrize(("head_dim", "block"), [(1, 1), (2, 2), (24, 8), (64, 64), (80, 16), (96, 32), (128, 128)])
def test_rotation_is_the_hadamard_matrix_of_the_largest_block(head_dim: int, block: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    heads = torch.randn(3, 2, head_dim, dtype=torch.float64)
    expected = (heads.view(3, 2, -1, block) @ (matrix / block**0.5)).view(heads.shape)
    turned = rotate_heads(heads)
    assert torch.allclose(turned, expected, rtol=0, atol=1e-12)
    assert torch.allclose(rotate_heads(turned), heads, rtol=0, atol=1e-12)


def test_rotation_keeps_scores_and_dtype() -> None:
    query, key = torch.randn(2, 7, 24, dtype=torch.float64)
    assert torch.allclose(rotate_heads(query) @ rotate_heads(key).T, query @ key.T, rtol=0, atol=1e-12)
    assert rotate_heads(query.bfloat16()).dtype == torch.bfloat16
