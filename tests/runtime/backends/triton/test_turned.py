"""Inputs that a Triton kernel multiplies by Hadamard matrices, before any linear."""

import pytest
import torch
from poisoned_memory import poisoned_allocations
from products import BOUND, activations, exact_product, relative_error
from tiny_models import random_weight

from compress.checkpoint.weights import Int
from compress.checkpoint.weights.rotated_inputs import rotate
from runtime.backends.base import Target
from runtime.backends.registry import REFERENCE, choose_linear, turned_linear
from runtime.backends.torch.quantized_linear import TurnedInputs
from runtime.backends.triton.kernels.turned import TritonTurnedInputs


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("order", [32, 128])
@pytest.mark.parametrize("tokens", [1, 5])
def test_inputs_are_those_of_plain_torch(gpu: torch.device, tokens: int, order: int, dtype: torch.dtype) -> None:
    x = activations(tokens, 384, dtype, gpu)
    linear = TritonTurnedInputs.of(lambda rows: rows, order, 384, gpu)
    with poisoned_allocations():
        found = linear(x)
    # 1 over the root of the order is rounded before it multiplies, so that few numbers round to their neighbours.
    assert float((found != rotate(x, order)).float().mean()) < 0.02
    assert relative_error(found, rotate(x.double(), order)) < BOUND[dtype]


def test_products_against_float64(gpu: torch.device) -> None:
    target, scheme = Target(gpu, torch.bfloat16), Int(4, 64)
    weight = random_weight((64, 256), scheme, 5)
    x = activations(3, 256, torch.bfloat16, gpu)
    base = choose_linear(scheme, 256, target).kernel.prepare(weight, None, target)
    found = TritonTurnedInputs.of(base, 128, 256, gpu)(x)
    assert relative_error(found, exact_product(rotate(x, 128), weight, None)) < BOUND[torch.bfloat16]


def test_other_orders_dtypes_and_kernels_are_plain_torch() -> None:
    cuda = torch.device("cuda")
    for order, target, kernels in (
        (16, Target(cuda, torch.bfloat16), "auto"),
        (64, Target(cuda, torch.float32), "auto"),
        (64, Target(cuda, torch.bfloat16), REFERENCE),
        (64, Target(torch.device("cpu"), torch.bfloat16), "auto"),
    ):
        assert isinstance(turned_linear(lambda rows: rows, 256, order, target, kernels), TurnedInputs)
