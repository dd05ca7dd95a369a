"""Integers with scales and minima of groups in Triton against the exact product in float64."""

import pytest
import torch
from poisoned_memory import poisoned_allocations
from products import BOUND, activations, exact_product, relative_error

from compress.checkpoint.weights import Q2K, Q3K, Q4K, Q5K, Q6K, Q4Minima, Q5Minima
from compress.checkpoint.weights.coded import CodedWeight
from runtime.backends.base import Linear, Target
from runtime.backends.registry import choose_linear
from runtime.backends.triton.linear import BLOCK_INTEGERS_KERNEL

ROWS, INPUTS = 70, 512


def random_codes(scheme, seed: int = 0) -> CodedWeight:
    """Random codes, scales and minima; in the first row scales are zero, in the second one minima are, too."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, scheme.max_code + 1, (ROWS, INPUTS), generator=random).to(torch.uint8)
    if not scheme.scales.step_bits:
        scales, minima = ((torch.rand(ROWS, INPUTS // 32, generator=random) / 50).half() for _ in range(2))
        scales[:2], minima[1] = 0, 0
        return CodedWeight(codes, scales, scheme, minima=8 * minima)
    steps = torch.randint(0, 64, (2, ROWS, INPUTS // 32), generator=random).to(torch.int8)
    supers = (torch.rand(2, ROWS, INPUTS // 256, generator=random) / 1000 + 1e-4).half()
    steps[0, :2], steps[1, 1] = 0, 0
    return CodedWeight(codes, supers[0], scheme, 8 * supers[1], steps[0], steps[1])


def linear_of(weight: CodedWeight, bias: torch.Tensor | None, gpu: torch.device, dtype: torch.dtype) -> Linear:
    target = Target(gpu, dtype)
    linear = BLOCK_INTEGERS_KERNEL.prepare(weight, bias, target)
    assert linear.nbytes == BLOCK_INTEGERS_KERNEL.nbytes(weight.scheme, *weight.shape, target)
    return linear


def check(gpu: torch.device, scheme, tokens: int, dtype: torch.dtype) -> None:
    weight, x, bias = random_codes(scheme), activations(tokens, INPUTS, dtype, gpu), activations(1, ROWS, dtype, gpu)[0]
    linear = linear_of(weight, bias, gpu, dtype)
    with poisoned_allocations():
        found = linear(x)
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]


@pytest.mark.parametrize(("scheme", "dtype"), [(Q4K(), torch.bfloat16), (Q5K(), torch.float16)], ids=str)
def test_few_tokens_against_float64(gpu, scheme, dtype: torch.dtype) -> None:
    check(gpu, scheme, 3, dtype)


@pytest.mark.full
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("scheme", [Q4K(), Q5K(), Q4Minima(), Q5Minima()], ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 70, 130])
def test_every_form_against_float64(gpu, scheme, tokens: int, dtype: torch.dtype) -> None:
    check(gpu, scheme, tokens, dtype)


@pytest.mark.parametrize("scheme", [Q4K(), Q5K(), Q4Minima(), Q5Minima()], ids=str)
def test_planes_hold_every_weight(gpu, scheme) -> None:
    """As exactly as float32 does, also where scales or minima are zero."""
    weight = random_codes(scheme)
    packed = linear_of(weight, None, gpu, torch.bfloat16).planes.weight
    shifts = torch.arange(0, 16, packed.bits, dtype=torch.int32, device=gpu)
    planes = packed.words.to(torch.int32).unsqueeze(2) >> shifts[:, None] & (1 << packed.bits) - 1
    codes = planes.permute(1, 0, 2, 3).flatten(1)[:ROWS, :INPUTS] ^ (128 if packed.bits == 8 else 0)
    zero, scale = packed.scales.unsqueeze(-1).view(torch.float32).double().unbind(-1)
    zero, scale = (each.T[:ROWS].repeat_interleave(32, 1)[:, :INPUTS] for each in (zero, scale))
    expected = weight.dequantize(torch.float64)
    scales, minima = weight.group_scales().abs(), weight.group_minima().abs()
    largest = (scales * weight.scheme.max_code + minima).repeat_interleave(32, 1).double()
    assert bool((((codes - zero) * scale).cpu() - expected).abs().le(2.0**-22 * largest).all())
    assert torch.equal(((codes - zero) * scale)[1].cpu(), torch.zeros(INPUTS, dtype=torch.float64))


@pytest.mark.parametrize("scheme", [Q4K(), Q5K(), Q4Minima(), Q5Minima()], ids=str)
def test_a_gpu_serves_groups_of_32(scheme) -> None:
    pytest.importorskip("triton")
    assert choose_linear(scheme, 512, Target(torch.device("cuda"), torch.bfloat16)).kernel is BLOCK_INTEGERS_KERNEL


@pytest.mark.parametrize("scheme", [Q2K(), Q3K(), Q6K()], ids=str)
def test_groups_of_16_are_dequantized_and_the_reason_is_said(scheme) -> None:
    pytest.importorskip("triton")
    choice = choose_linear(scheme, 512, Target(torch.device("cuda"), torch.bfloat16))
    assert choice.kernel.name == "dequantized"
    assert "triton_k takes groups that are a multiple of 32" in choice.reason
