"""Which devices and dtypes Triton kernels are for."""

from __future__ import annotations

import pytest
import torch

from compress.checkpoint.scheme import Scheme
from runtime.backends.base import Target
from runtime.backends.registry import choose_kernel
from runtime.backends.triton.attention import refuse
from runtime.backends.triton.device import refuse_triton

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
    assert refuse_triton(device, dtype) == said


def test_older_gpus_get_plain_torch_and_a_reason(turing: torch.device) -> None:
    said = "needs a GPU of compute capability 8.0 or newer"
    assert refuse_triton(turing, torch.float16) == said
    assert refuse(turing, torch.float16, 64, recent=0) == said
    choice = choose_kernel(Scheme(4, 128), 256, Target(turing, torch.float16))
    assert not choice.kernel.name.startswith("triton")
    assert f"triton_planes {said}" in choice.reason
