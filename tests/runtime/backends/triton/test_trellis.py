"""Trellis codes that Triton decodes into panels, against exact numbers and products in float64."""

import pytest
import torch
from poisoned_memory import poisoned_allocations
from products import BOUND, activations, exact_product, relative_error
from tiny_models import random_weight

from compress.checkpoint.weights import Exl3
from compress.checkpoint.weights.exl3 import CODEBOOKS, decode_tiles
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.backends.triton.kernels.trellis import TrellisLinear
from runtime.backends.triton.linear import EXL3_KERNEL

CUDA = torch.device("cuda")


def linear_of(scheme: Exl3, shape: tuple[int, int], target: Target, bias: torch.Tensor | None = None) -> TrellisLinear:
    linear = EXL3_KERNEL.prepare(random_weight(shape, scheme, 5), bias, target)
    assert isinstance(linear, TrellisLinear)
    assert linear.nbytes == EXL3_KERNEL.nbytes(scheme, *shape, target)
    return linear


@pytest.mark.parametrize(
    "scheme",
    [Exl3(bits, CODEBOOKS[bits % 3]) for bits in range(1, 9)] + [Exl3(bits + 0.5, "mul1") for bits in range(1, 5)],
    ids=str,
)
def test_numbers_are_exact_and_in_their_places(gpu: torch.device, scheme: Exl3) -> None:
    linear = linear_of(scheme, (256, 128), Target(gpu, torch.float16))
    panel = torch.full((128, 128), torch.nan, dtype=torch.float16, device=gpu)
    linear.expand_rows(128, panel)
    expected = decode_tiles(random_weight((256, 128), scheme, 5).trellis, scheme)
    assert torch.equal(panel.T.cpu(), expected[:, 128:].half())


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("tokens", "shape"), [(1, (256, 512)), (5, (200, 328)), (17, (384, 640))])
def test_products_against_float64(gpu: torch.device, tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random_weight(shape, Exl3(2.5, "mul1") if tokens == 5 else Exl3(3, CODEBOOKS[tokens % 3]), 5)
    x, bias = activations(tokens, shape[1], dtype, gpu), activations(1, shape[0], dtype, gpu)[0]
    linear = linear_of(weight.scheme, shape, Target(gpu, dtype), bias)
    with poisoned_allocations():
        found = linear(x)
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]


def test_it_serves_where_dense_weights_do_not_fit() -> None:
    target = Target(CUDA, torch.bfloat16)
    assert choose_linear(Exl3(4), 256, target).kernel.name == "dequantized"
    excluded = {"dequantized": "would need 9 GiB of 1 GiB"}
    assert choose_linear(Exl3(4), 256, target, excluded=excluded).kernel is EXL3_KERNEL
    assert choose_linear(Exl3(4), 256, target, "triton_exl3").kernel is EXL3_KERNEL
    assert choose_linear(Exl3(4), 256, Target(CUDA, torch.float32), excluded=excluded).kernel.name == "reference"
