"""Products with 8-bit floats in Triton against the exact product in float64, with memory poisoned before it is
written."""

import pytest
import torch
from poisoned_memory import poisoned_allocations
from tiny_models import random_weight

from compress.checkpoint.scale_search import FP8, quantize_tokens
from compress.checkpoint.weights import Activations, Fp8
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.backends.triton.fused_linear import Q8_FLOAT, ActivationLayout
from runtime.backends.triton.linear import FP8_KERNEL, FP8_W8A16_KERNEL, multiplies_fp8

W8A16, W8A8 = Fp8(), Fp8(Activations.FP8)
BOUND = {torch.bfloat16: 6e-3, torch.float16: 6e-4}
"""Tolerance of the output's rounding; the interpreter truncates bfloat16 where a GPU rounds to the nearest."""


def activations(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def relative_error(found, expected) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def exact_product(x, weight, bias):
    """Reference of the scheme in float64."""
    if weight.scheme.activation_bits:
        levels, scale = quantize_tokens(x, Activations.FP8)
        x = levels.double() * scale.double()
    return x.double() @ weight.dequantize(torch.float64).to(x.device).T + bias.double()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("scheme", [W8A16, W8A8], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_few_tokens_against_float64(gpu, tokens, scheme, dtype) -> None:
    from runtime.backends.triton.kernels.fp8 import multiply_fp8, place_fp8

    weight, target = random_weight((70, 328), scheme), Target(gpu, dtype)
    x, bias = activations(tokens, 328, dtype, gpu), activations(1, 70, dtype, gpu)[0]
    placed = place_fp8(weight, target, native=False, num_processors=4)
    for kernel in (FP8_KERNEL, FP8_W8A16_KERNEL):
        assert placed.nbytes == kernel.nbytes(scheme, *weight.shape, target)
    with poisoned_allocations():
        found = multiply_fp8(x, placed, bias)
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]


@pytest.mark.parametrize("with_bias", [True, False])
def test_many_tokens_by_8_bit_products(gpu, with_bias) -> None:
    from runtime.backends.triton.kernels.fp8 import multiply_fp8, place_fp8

    if gpu.type == "cuda" and not multiplies_fp8(gpu):
        pytest.skip("this GPU has no 8-bit floats")
    weight, target = random_weight((150, 200), W8A8), Target(gpu, torch.float16)
    x, bias = activations(131, 200, torch.float16, gpu), activations(1, 150, torch.float16, gpu)[0]
    placed = place_fp8(weight, target, native=True, num_processors=4)
    with poisoned_allocations():
        found = multiply_fp8(x, placed, bias if with_bias else None)
    expected = exact_product(x, weight, bias if with_bias else torch.zeros_like(bias))
    # A GPU keeps about 14 bits of the sum over a block of inputs.
    assert relative_error(found, expected) < (6e-4 if gpu.type == "cpu" else 2e-3)


def test_tokens_are_rounded_as_the_contract_says(gpu) -> None:
    from runtime.backends.triton.kernels.norm_act import convert_input

    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    between = numbers[:126] / 2 + numbers[1:127] / 2  # halfway: to the even code
    x = torch.zeros(5, 300, dtype=torch.float16)
    x[0, :126], x[0, 126:253], x[0, 253:299], x[0, 299] = between, numbers[:127], -between[:46], 448
    x[1] = activations(1, 300, torch.float16, torch.device("cpu"))[0]
    x[2] = 1e-7 * x[1]
    x[4] = x[1] * 1000
    x = x.to(gpu)
    with poisoned_allocations():
        made = convert_input(x, ActivationLayout(Q8_FLOAT))
    levels, scale = quantize_tokens(x, Activations.FP8)
    assert torch.equal(made.rows, levels.to(FP8).view(torch.uint8))
    assert torch.equal(made.beside, scale[:, 0])


def test_every_code_is_read_as_its_number(gpu) -> None:
    from runtime.backends.triton.kernels.fp8 import multiply_fp8, place_fp8

    weight, target = random_weight((64, 256), W8A16), Target(gpu, torch.float16)
    weight.scales.fill_(1.0)
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[0x7F], numbers[0xFF] = 0, 0x80
    weight.qweight.view(torch.uint8)[:] = numbers
    one_hot = torch.eye(256, dtype=torch.float16, device=gpu)
    found = multiply_fp8(one_hot, place_fp8(weight, target, False, 1), None)
    assert torch.equal(found[:, 0].float().cpu(), numbers.view(FP8).float())


def test_a_token_does_not_see_its_neighbours(gpu) -> None:
    linear = FP8_KERNEL.prepare(random_weight((64, 256), W8A8), None, Target(gpu, torch.bfloat16))
    x = activations(5, 256, torch.bfloat16, gpu)
    together = linear(x)
    x[1:] = float("nan")
    alone = linear(x)
    assert torch.equal(alone[0], together[0])
    assert not torch.isfinite(alone[1:]).any()


def test_a_gpu_serves_8_bit_floats_with_it() -> None:
    target = Target(torch.device("cuda"), torch.bfloat16)
    assert choose_linear(W8A8, 768, target).kernel is FP8_KERNEL
    assert choose_linear(W8A16, 768, target).kernel is FP8_W8A16_KERNEL
    assert choose_linear(W8A8, 768, Target(torch.device("cuda"), torch.float32)).kernel.name == "dequantized"


def test_an_older_gpu_says_why_it_multiplies_in_16_bits(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    choice = choose_linear(W8A8, 768, Target(torch.device("cuda"), torch.bfloat16))
    assert choice.kernel is FP8_W8A16_KERNEL
    assert "triton_fp8 needs a GPU that multiplies 8-bit floats" in choice.reason
