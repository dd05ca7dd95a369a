"""Which devices and dtypes Triton kernels are for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.checkpoint.weights import Int
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.backends.triton.attention import attention_unsupported_reason
from runtime.backends.triton.linear import unsupported_reason
from runtime.core.memory_plan import MemoryPlan

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU from before tensor cores multiplied what the kernels do."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    return GPU


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        (CPU, torch.bfloat16, "runs on NVIDIA GPUs"),
        (GPU, torch.float32, "computes in 16 bits"),
        (GPU, torch.float16, ""),
    ],
)
def test_devices_and_dtypes(device: torch.device, dtype: torch.dtype, said: str) -> None:
    pytest.importorskip("triton")
    assert unsupported_reason(device, dtype) == said


def test_older_gpus_get_plain_torch_and_a_reason(turing: torch.device) -> None:
    said = "needs a GPU of compute capability 8.0 or newer"
    assert unsupported_reason(turing, torch.float16) == said
    model: Any = SimpleNamespace(device=turing, dtype=torch.float16)
    assert attention_unsupported_reason(model, MemoryPlan(0, 64, 16, 4, 64, "")) == said
    choice = choose_linear(Int(4, 128), 256, Target(turing, torch.float16))
    assert not choice.kernel.name.startswith("triton")
    assert f"triton_w4a16 {said}" in choice.reason
