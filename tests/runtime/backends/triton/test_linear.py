"""Packed linears in Triton against the exact product in float64: every kernel, width, group and ragged edge, with
memory poisoned before it is written."""

import pytest
import torch
from covering import covering
from poisoned_memory import poisoned_allocations
from tiny_models import random_weight

from compress.checkpoint.scale_search import quantize_tokens
from compress.checkpoint.weights import Activations, Int, Scheme
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.backends.triton.kernels.configs import EXPAND, GEMM, SKINNY, KernelConfig
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight
from runtime.backends.triton.linear import W4A16_KERNEL, W8A16_KERNEL

CONFIGS = [
    KernelConfig(SKINNY, 64, 16),
    KernelConfig(SKINNY, 128, 16, splits=3),
    KernelConfig(GEMM, 64, 16),
    KernelConfig(EXPAND),
]
PLANED = [
    Int(4, 128),
    Int(4, 32, False),
    Int(4, None, False),
    Int(4, 96),
    Int(3, 64),
    Int(2, 64, False),
]
BOUND = {torch.bfloat16: 6e-3, torch.float16: 6e-4}
"""Tolerance of the output's rounding; the interpreter truncates bfloat16 where a GPU rounds to the nearest."""


def activations(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def relative_error(found, expected) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("config", "scheme", "dtype"), covering(CONFIGS, PLANED, list(BOUND)), ids=str)
def test_planes_against_float64(gpu, config: KernelConfig, scheme: Scheme, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.w4a16 import multiply_w4a16
    from runtime.backends.triton.kernels.weight_layout import interleave

    inputs = 288 if scheme.group_size in (96, 32) else 512
    weight = random_weight((100, inputs), scheme)
    x, bias = activations(3, inputs, dtype, gpu), activations(1, 100, dtype, gpu)[0]
    exact = weight.dequantize(torch.float64).to(gpu)
    packed = interleave(weight, gpu)
    with poisoned_allocations():
        found = multiply_w4a16(x, packed, bias, config)
    assert found.dtype == dtype
    assert relative_error(found, x.double() @ exact.T + bias.double()) < BOUND[dtype]


def unpack_planes(packed: InterleavedWeight) -> torch.Tensor:
    """The weight `[N, K]` that the layout holds, in float64."""
    rows, inputs = packed.shape
    shifts = torch.arange(0, 16, packed.bits, dtype=torch.int32, device=packed.words.device)
    planes = packed.words.to(torch.int32).unsqueeze(2) >> shifts[:, None] & (1 << packed.bits) - 1
    codes = planes.permute(1, 0, 2, 3).flatten(1)[:rows, :inputs]
    repeats = packed.group_size or inputs
    scale = packed.scale.T[:rows].repeat_interleave(repeats, 1)[:, :inputs]
    zero: int | torch.Tensor = packed.midpoint
    if packed.zero is not None:
        zero = packed.zero.T[:rows].repeat_interleave(repeats, 1)[:, :inputs]
    return (codes - zero).double() * scale.double()


@pytest.mark.parametrize("scheme", PLANED, ids=str)
def test_planes_hold_every_code(gpu, scheme: Scheme) -> None:
    from runtime.backends.triton.kernels.weight_layout import interleave

    inputs = 3 * (scheme.group_size or 96)
    weight = random_weight((130, inputs), scheme)
    packed = interleave(weight, gpu)
    assert torch.equal(unpack_planes(packed).cpu(), weight.dequantize(torch.float64))
    assert packed.words.shape == (-(-inputs // (512 // packed.bits)), 256, 32)
    assert packed.nbytes == W4A16_KERNEL.nbytes(scheme, *weight.shape, Target(gpu, torch.bfloat16))


def test_whole_numbers_come_out_exactly(gpu) -> None:
    from runtime.backends.triton.kernels.w4a16 import multiply_w4a16
    from runtime.backends.triton.kernels.weight_layout import interleave

    weight = random_weight((64, 256), Int(4, 64, False))
    weight.scales.copy_(2.0 ** torch.randint(-3, 4, weight.scales.shape))
    x = torch.randint(-1, 2, (2, 256)).to(gpu, torch.float16)
    exact = x.double() @ weight.dequantize(torch.float64).to(gpu).T
    found = multiply_w4a16(x, interleave(weight, gpu), None, KernelConfig(SKINNY, splits=2))
    assert torch.equal(found.double(), exact.half().double())


def test_a_token_does_not_see_its_neighbours(gpu) -> None:
    from runtime.backends.triton.kernels.w4a16 import multiply_w4a16
    from runtime.backends.triton.kernels.weight_layout import interleave

    packed = interleave(random_weight((64, 256), Int(4, 128)), gpu)
    x = activations(5, 256, torch.bfloat16, gpu)
    config = KernelConfig(SKINNY, splits=2)
    together = multiply_w4a16(x, packed, None, config)
    x[1:] = float("nan")
    assert torch.equal(multiply_w4a16(x, packed, None, config)[0], together[0])


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("scheme", [Int(8, None), Int(8, 32, False), Int(6, 96)], ids=str)
@pytest.mark.parametrize("tokens", [1, 70])
def test_bytes_against_float64(gpu, tokens: int, scheme: Scheme, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.int8_gemm import multiply_w8a16, pack_int8

    weight = random_weight((70, 288), scheme)
    x, bias = activations(tokens, 288, dtype, gpu), activations(1, 70, dtype, gpu)[0]
    packed = pack_int8(weight, gpu)
    assert torch.equal(packed.dequantize(torch.float32).cpu(), weight.dequantize(torch.float32))
    assert packed.nbytes == W8A16_KERNEL.nbytes(scheme, *weight.shape, Target(gpu, dtype))
    with poisoned_allocations():
        found = multiply_w8a16(x, packed, bias, num_processors=4)
    expected = x.double() @ weight.dequantize(torch.float64).to(gpu).T + bias.double()
    assert relative_error(found, expected) < BOUND[dtype]


@pytest.mark.parametrize("tokens", [1, 70])
def test_levels_against_the_exact_product(gpu, tokens: int) -> None:
    from runtime.backends.triton.kernels.int8_gemm import multiply_int8, pack_int8

    weight = random_weight((70, 288), Int(8, None, True, Activations.INT8))
    x = activations(tokens, 288, torch.float16, gpu)
    levels, scale = quantize_tokens(x)
    with poisoned_allocations():
        found = multiply_int8(x, pack_int8(weight, gpu), None, num_processors=4)
    expected = levels.double() @ weight.dequantize(torch.float64).to(gpu).T * scale.double()
    assert relative_error(found, expected) < BOUND[torch.float16]


def test_a_gpu_serves_every_packed_scheme_with_them() -> None:
    target = Target(torch.device("cuda"), torch.bfloat16)
    names = {
        str(s): choose_linear(s, 768, target).kernel.name
        for s in (*PLANED, Int(8, 64), Int(8, None, True, Activations.INT8))
    }
    assert set(list(names.values())[:-2]) == {"triton_w4a16"}
    assert list(names.values())[-2:] == ["triton_w8a16", "triton_w8a8"]
    assert choose_linear(Int(4, 16), 768, target).kernel.name == "dequantized"
    assert choose_linear(Int(), 768, Target(torch.device("cuda"), torch.float32)).kernel.name == "dequantized"


def test_linears_of_the_table_choose_by_tokens(gpu) -> None:
    weight = random_weight((64, 256), Int(4, 128))
    linear = W4A16_KERNEL.prepare(weight, None, Target(gpu, torch.bfloat16))
    for tokens in (1, 65, 1100):
        x = activations(tokens, 256, torch.bfloat16, gpu)
        expected = x.double() @ weight.dequantize(torch.float64).to(gpu).T
        assert relative_error(linear(x), expected) < BOUND[torch.bfloat16]
