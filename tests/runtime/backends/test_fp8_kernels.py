"""8-bit floats on a CPU: exact numbers, tokens rounded as the contract says, the size known beforehand."""

import pytest
import torch
from tiny_models import random_weight

from compress.checkpoint.scale_search import quantize_tokens
from compress.checkpoint.weights import Activations, Fp8, Int
from compress.common.errors import SchemeError
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.model.composed import fuse_weights

CPU = torch.device("cpu")
W8A16, W8A8 = Fp8(), Fp8(Activations.FP8)
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 6e-3}
"""In bfloat16 the weights and the rounded inputs are rounded too."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("scheme", [W8A16, W8A8], ids=str)
@pytest.mark.parametrize("name", ["dequantized", "reference"])
def test_products_and_sizes(name, scheme, dtype):
    target, generator = Target(CPU, dtype), torch.Generator().manual_seed(0)
    weight = random_weight((100, 160), scheme)
    x, bias = (torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype) for rows in ((7, 160), (100,)))
    seen = x.double()
    if scheme.activation_bits:
        levels, scale = quantize_tokens(x, Activations.FP8)
        seen = levels.double() * scale.double()
    expected = seen @ weight.dequantize(torch.float64).T + bias.double()
    kernel = choose_linear(scheme, 160, target, name).kernel
    linear = kernel.prepare(weight, bias, target)
    found = linear(x)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < BOUND[dtype] * expected.norm()
    assert linear.nbytes == kernel.nbytes(scheme, 100, 160, target)


def test_what_serves_it_and_why():
    """Compiled code has no float16."""
    choice = choose_linear(W8A8, 256, Target(CPU, torch.float16))
    assert choice.kernel.name == "dequantized"
    assert "triton_fp8 runs on NVIDIA GPUs" in choice.reason
    assert "cpu_fp8 " in choice.reason
    assert "cpu " not in choice.reason
    asked = choose_linear(W8A8, 256, Target(CPU, torch.float16), "8bit")
    assert asked.kernel.name == "dequantized"
    assert "cpu_w4a8 multiplies by" in asked.reason
    excluded = {"dequantized": "would need 9 GiB of 1 GiB"}
    assert choose_linear(W8A8, 256, Target(CPU, torch.float16), excluded=excluded).kernel.name == "reference"


def test_kernels_of_the_other_numbers_are_refused():
    target = Target(CPU, torch.bfloat16)
    with pytest.raises(SchemeError, match=r"w8a8.*fp8"):
        choose_linear(W8A8, 256, target, "cpu")
    with pytest.raises(SchemeError, match=r"triton_fp8.*w4a16.*g128"):
        choose_linear(Int(), 256, target, "triton_fp8")
    with pytest.raises(SchemeError, match=r"'fp8'.*triton_fp8"):
        choose_linear(W8A8, 256, target, "fp8")
    assert choose_linear(W8A8, 7, Target(CPU, torch.float64), "reference").kernel.name == "reference"


def test_siblings_become_one_weight():
    parts = [random_weight((rows, 64), W8A8, seed=rows) for rows in (32, 16)]
    fused = fuse_weights(parts)
    assert fused.shape == (48, 64)
    assert torch.equal(fused.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert fuse_weights([parts[0], random_weight((16, 64), W8A16)]) is None
    assert fuse_weights([parts[0], random_weight((16, 64), Int(8, None, activations=Activations.INT8))]) is None
