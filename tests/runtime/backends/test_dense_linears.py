"""Which product serves a weight that is not quantized, and that each of them is right."""

import pytest
import torch
from tiny_models import save_tiny_model

from compress.cpu.binding import absence
from runtime.backends.base import RowSource, Target
from runtime.backends.cpu import linear_kernels
from runtime.backends.cpu.layers import layers_unsupported_reason
from runtime.backends.cpu.linear import CpuLinear
from runtime.backends.cpu.linear_kernels import DENSE
from runtime.backends.registry import choose_dense
from runtime.backends.torch import linear as torch_linear
from runtime.backends.torch.linear import ONEDNN, PLAIN
from runtime.core.config import RuntimeConfig
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

CPU = torch.device("cpu")
BF16 = Target(CPU, torch.bfloat16)
needs_vectors = pytest.mark.skipif(not linear_kernels.has_vectors(), reason=absence() or "no vectors for this CPU")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_vectors
@pytest.mark.parametrize(
    ("in_features", "target", "kernel", "said"),
    [
        (64, BF16, DENSE, ""),
        (40, BF16, ONEDNN, "cpu takes inputs that are a multiple of 32"),
        (64, Target(CPU, torch.float32), PLAIN, "cpu holds bfloat16 numbers"),
        (64, Target(torch.device("cuda"), torch.bfloat16), PLAIN, "cpu runs on CPUs"),
    ],
)
def test_the_choice_says_why(in_features, target, kernel, said, monkeypatch):
    monkeypatch.setattr(torch_linear, "is_fast", lambda dtype: True)
    monkeypatch.setattr(linear_kernels, "dense_refusal", lambda: "")
    choice = choose_dense(64, in_features, target)
    assert choice.kernel is kernel
    assert said in choice.reason


@needs_vectors
def test_onednn_multiplies_where_it_is_said_to(monkeypatch):
    monkeypatch.setattr(torch_linear, "is_fast", lambda dtype: True)
    monkeypatch.setattr(linear_kernels, "dense_refusal", lambda: "leaves it to oneDNN: 0.80 times")
    choice = choose_dense(64, 64, BF16)
    assert choice.kernel is ONEDNN
    assert "cpu leaves it to oneDNN: 0.80 times" in choice.reason


def test_without_native_kernels(monkeypatch):
    monkeypatch.setattr(linear_kernels, "absence", lambda: "not compiled")
    for products, kernel in ((True, ONEDNN), (False, PLAIN)):
        monkeypatch.setattr(torch_linear, "is_fast", lambda dtype, products=products: products)
        choice = choose_dense(64, 64, BF16)
        assert choice.kernel is kernel
        assert "not compiled" in choice.reason


def test_reference_is_plain_torch():
    assert choose_dense(64, 64, BF16, "reference").kernel is PLAIN


@pytest.mark.parametrize("shape", [(24, 40), (70, 96), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_product_rows_and_size(shape, dtype):
    """Products, rows where there are any, and the size that was known before."""
    target, weight, bias = Target(CPU, dtype), random(*shape, seed=1).to(dtype), random(shape[0], seed=2).to(dtype)
    kernel = choose_dense(*shape, target).kernel
    linear = kernel.prepare(weight, bias)
    assert linear.nbytes == kernel.nbytes(*shape, target)
    for rows in (1, 5, 33):
        x = random(rows, shape[1], seed=3).to(dtype)
        expected = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(
            linear(x).double(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=0.05
        )
    assert (isinstance(linear, RowSource) and linear.reads_rows) == kernel.reads_rows
    if isinstance(linear, RowSource):
        indices = torch.tensor([shape[0] - 1, 0, 3])
        assert torch.equal(linear.rows(indices, dtype), weight[indices])


@needs_vectors
@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_checkpoint_runs_compiled(tied, tmp_path, monkeypatch):
    """All of its linears: the layers run in one call, and a head that is the embedding is held once."""
    monkeypatch.setattr(linear_kernels, "dense_refusal", lambda: "")
    path = save_tiny_model(
        tmp_path, dtype=torch.bfloat16, tie_word_embeddings=tied, hidden_size=128, intermediate_size=96
    )
    model = load_model(path, dtype="bfloat16")
    assert isinstance(model.head, CpuLinear)
    assert layers_unsupported_reason(model, build_runner(model, RuntimeConfig()).memory) == ""
    assert any("dense bfloat16, kernel cpu" in line for line in model.description)
    held = model.head.nbytes + sum(linear.nbytes for layer in model.layers for linear in layer.linears)
    embedding = 0 if tied else model.config.spec.vocab_size * model.config.spec.hidden_size * 2
    assert model.nbytes == held + embedding
