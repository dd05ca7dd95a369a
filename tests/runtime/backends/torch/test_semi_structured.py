"""2:4 weights in 16 bits on a GPU: when they are served so and why not; their product where there is a GPU."""

import pytest
import torch

from compress.checkpoint.weights import NM, Int, NMSparsity
from runtime.backends.base import Target
from runtime.backends.registry import choose_dense, choose_linear
from runtime.backends.torch import linear as torch_linear
from runtime.backends.torch.linear import SEMI_STRUCTURED, SPARSE, SemiStructuredLinear, is_two_of_four

CUDA = torch.device("cuda")
GPU = Target(CUDA, torch.bfloat16)


def two_of_four(rows: int, columns: int) -> torch.Tensor:
    """Random places among each four are kept."""
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns // 4, 4, generator=random).bfloat16()
    places = torch.rand(rows, columns // 4, 4, generator=random).argsort(-1)[..., :2]
    return weight.scatter(-1, places, 0).view(rows, columns)


@pytest.fixture(autouse=True)
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found = [(9, 0)]
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch_linear, "_capability", lambda device: found[0])
    return found


def test_the_pattern_is_seen() -> None:
    weight = two_of_four(32, 64)
    assert is_two_of_four(weight)
    weight[3, 8:11] = 1
    assert not is_two_of_four(weight)
    assert not is_two_of_four(torch.zeros(4, 6))


@pytest.mark.parametrize(
    ("shape", "device", "dtype", "reason"),
    [
        ((64, 128), CUDA, torch.bfloat16, ""),
        ((64, 128), torch.device("cpu"), torch.bfloat16, "runs on NVIDIA GPUs"),
        ((64, 128), CUDA, torch.float32, "computes in 16 bits"),
        ((65, 128), CUDA, torch.float16, "takes 32 rows and 64 inputs, or a multiple"),
        ((64, 96), CUDA, torch.float16, "takes 32 rows and 64 inputs, or a multiple"),
    ],
)
def test_what_it_takes(shape, device, dtype, reason: str) -> None:
    assert SPARSE.unsupported_reason(*shape, Target(device, dtype)) == reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that is there has a capability of its own")
def test_older_gpus_have_no_sparse_tensor_cores(capability) -> None:
    capability[0] = (7, 5)
    assert SPARSE.unsupported_reason(64, 128, Target(CUDA, torch.float16)).startswith("needs sparse tensor cores")


def test_it_is_chosen_by_name_and_else_says_why_not() -> None:
    weight = two_of_four(32, 64)
    asked = choose_dense(32, 64, GPU, SEMI_STRUCTURED, weight)
    assert asked.kernel is SPARSE
    assert "asked for" in asked.reason
    unasked = choose_dense(32, 64, GPU, "auto", weight)
    assert unasked.kernel is not SPARSE
    assert "--linear-backend semi_structured" in unasked.reason
    misshapen = choose_dense(20, 64, GPU, SEMI_STRUCTURED, weight[:20])
    assert misshapen.kernel is not SPARSE
    assert "semi_structured takes 32 rows" in misshapen.reason
    assert "semi_structured" not in choose_dense(32, 64, GPU, SEMI_STRUCTURED, torch.ones(32, 64)).reason
    cpu = Target(torch.device("cpu"), torch.bfloat16)
    assert "semi_structured runs on NVIDIA GPUs" in choose_dense(32, 64, cpu, SEMI_STRUCTURED, weight).reason
    assert "semi_structured" not in choose_dense(32, 64, cpu, "auto", weight).reason


def test_integers_that_are_2_of_4_are_expanded_and_it_is_said() -> None:
    scheme = NM(Int(4, 128), NMSparsity(2, 4))
    choice = choose_linear(scheme, 256, GPU)
    assert choice.kernel.name in ("triton_w4a16", "dequantized")
    assert "zeros of 2:4 are expanded at load" in choice.reason
    assert "expanded" not in choose_linear(Int(4, 128), 256, GPU).reason
    assert choose_linear(scheme, 256, GPU, SEMI_STRUCTURED).kernel is choice.kernel


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 8, 77, 300])
def test_the_product_is_that_of_the_dense_weight(tokens: int) -> None:
    weight = two_of_four(256, 512).to(CUDA)
    x = torch.randn(tokens, 512, device=CUDA, dtype=torch.bfloat16)
    bias = torch.randn(256, device=CUDA, dtype=torch.bfloat16)
    linear = SemiStructuredLinear(weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    found = linear(x)
    assert found.shape == (tokens, 256)
    assert ((found.double() - expected).norm() / expected.norm()).item() < 6e-3
    assert linear.nbytes == weight.nbytes * 9 // 16
