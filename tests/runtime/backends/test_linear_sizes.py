"""The size known beforehand is the size of the prepared weight."""

import pytest
import torch
from tiny_models import random_weight

from compress.checkpoint.weights import Activations, Bnb4, Int, Scheme
from runtime.backends.base import Target
from runtime.backends.registry import choose_dense, linear_kernels

TARGETS = [Target(torch.device("cpu"), dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
SCHEMES = [
    Int(4, 128),
    Int(4, 64, symmetric=False),
    Int(3, 32),
    Int(2, None),
    Int(8, 128),
    Int(8, None, True, Activations.INT8),
    Bnb4("nf4", 64),
    Bnb4("nf4", 128),
    Bnb4("fp4", 32),
]
SHAPES = [(64, 256), (192, 128), (100, 384)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.dtype))
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel(shape: tuple[int, int], scheme: Scheme, target: Target) -> None:
    kernels = [kernel for kernel in linear_kernels() if kernel.takes(scheme)]
    serving = [kernel for kernel in kernels if not kernel.unsupported_reason(scheme, shape[1], target)]
    assert serving
    for kernel in serving:
        linear = kernel.prepare(random_weight(shape, scheme), None, target)
        assert linear.nbytes == kernel.nbytes(scheme, *shape, target), kernel.name


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.dtype))
def test_dense(target: Target) -> None:
    kernel = choose_dense(24, 40, target).kernel
    assert kernel.prepare(torch.zeros(24, 40, dtype=target.dtype), None).nbytes == kernel.nbytes(24, 40, target)
