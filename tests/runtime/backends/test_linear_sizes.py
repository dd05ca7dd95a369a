"""The size known beforehand is the size of the prepared weight."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_weight

from compress.checkpoint.scheme import Scheme
from runtime.backends.base import Target
from runtime.backends.cpu import linear as cpu_linear
from runtime.backends.linear_sizes import dense_bytes, prepared_bytes
from runtime.backends.registry import KERNELS
from runtime.backends.torch.linear import dense_linear

TARGETS = [Target(torch.device("cpu"), dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
SCHEMES = [
    Scheme(4, 128),
    Scheme(4, 64, symmetric=False),
    Scheme(3, 32),
    Scheme(2, None),
    Scheme(8, 128),
    Scheme(8, None, True, 8),
]
SHAPES = [(64, 256), (192, 128), (100, 384)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.dtype))
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel(shape: tuple[int, int], scheme: Scheme, target: Target) -> None:
    serving = [kernel for kernel in (*KERNELS, cpu_linear.W4A8) if not kernel.refuse(scheme, shape[1], target)]
    assert serving
    for kernel in serving:
        linear = kernel.prepare(random_weight(shape, scheme), None, target)
        assert linear.nbytes == prepared_bytes(kernel.name, scheme, *shape, target), kernel.name


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.dtype))
def test_dense(target: Target) -> None:
    assert dense_linear(torch.zeros(24, 40), None, target).nbytes == dense_bytes(24, 40, target)
