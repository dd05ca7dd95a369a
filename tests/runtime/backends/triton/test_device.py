"""Which devices, dtypes and schemes Triton kernels are for."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.checkpoint.weights import Activations, BlockFp8, Bnb4, Fp8, Int, Iq4Nl, Mxfp8, Nf4, Scheme
from compress.common.errors import ToolkitError
from runtime.backends.base import Target
from runtime.backends.measured import table_path
from runtime.backends.registry import choose_linear
from runtime.backends.triton import device as triton_device
from runtime.backends.triton.attention import attention_unsupported_reason
from runtime.backends.triton.device import Gpu, unsupported_reason
from runtime.core.memory_plan import MemoryPlan

GPU, CPU = torch.device("cuda"), torch.device("cpu")
FP8_W8A8 = Fp8(Activations.FP8)
PLANED = [Int(4, 128), Int(4, 32, False), Int(4, None, False), Int(4, 96), Int(3, 64), Int(2, 64, False)]


@pytest.fixture
def older_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of a compute capability."""
    pytest.importorskip("triton")
    monkeypatch.setattr("runtime.backends.triton.device.gpu_of", lambda device: Gpu("older", request.param, 40))
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


@pytest.mark.parametrize("older_gpu", [(7, 5)], indirect=True)
def test_gpus_from_before_such_tensor_cores_get_plain_torch_and_a_reason(older_gpu: torch.device) -> None:
    said = "needs a GPU of compute capability 8.0 or newer"
    assert unsupported_reason(older_gpu, torch.float16) == said
    model: Any = SimpleNamespace(device=older_gpu, dtype=torch.float16)
    assert attention_unsupported_reason(model, MemoryPlan(0, 64, 16, 4, 64, "")) == said
    choice = choose_linear(Int(4, 128), 256, Target(older_gpu, torch.float16))
    assert not choice.kernel.name.startswith("triton")
    assert f"triton_w4a16 {said}" in choice.reason


@pytest.mark.parametrize("older_gpu", [(8, 0)], indirect=True)
def test_gpus_without_8_bit_floats_multiply_in_16_bits_and_say_why(older_gpu: torch.device) -> None:
    choice = choose_linear(FP8_W8A8, 768, Target(older_gpu, torch.bfloat16))
    assert choice.kernel.name == "triton_fp8_w8a16"
    assert "triton_fp8 needs a GPU that multiplies 8-bit floats" in choice.reason


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        *((scheme, "triton_w4a16") for scheme in PLANED),
        (Int(8, 64), "triton_w8a16"),
        (Int(8, None, True, Activations.INT8), "triton_w8a8"),
        (Int(4, None, True, Activations.INT8), "triton_w8a8"),
        (Int(4, 64, True, Activations.INT8), "triton_rounded"),
        (Int(4, None, True, Activations.INT4), "triton_rounded"),
        (FP8_W8A8, "torch_scaled_fp8"),
        (Fp8(), "triton_fp8_w8a16"),
        (BlockFp8(), "triton_fp8_w8a16"),
        (BlockFp8((128, 64)), "dequantized"),
        (Mxfp8(), "triton_fp8_w8a16"),
        (Nf4(), "triton_table"),
        (Bnb4("nf4", 32), "triton_table"),
        (Bnb4("fp4", 64), "triton_table"),
        (Iq4Nl(), "triton_table"),
        (Int(4, 16), "dequantized"),
    ],
    ids=str,
)
def test_a_gpu_serves_every_packed_scheme(scheme: Scheme, name: str) -> None:
    assert choose_linear(scheme, 768, Target(GPU, torch.bfloat16)).kernel.name == name
    assert choose_linear(scheme, 768, Target(GPU, torch.float32)).kernel.name in ("dequantized", "reference")


@pytest.mark.parametrize("block", [128, 256, 4096])
def test_normal_floats_in_other_blocks_are_dequantized_and_the_reason_is_given(block: int) -> None:
    choice = choose_linear(Bnb4("nf4", block), 4096, Target(GPU, torch.bfloat16))
    assert choice.kernel.name == "dequantized"
    assert "triton_table takes groups of 32 or 64" in choice.reason


@pytest.mark.parametrize(
    ("asked", "capability", "checked", "overlaps"),
    [
        ("auto", (9, 0), None, False),
        ("auto", (9, 0), (9, 0), True),
        ("auto", (10, 0), (9, 0), False),
        ("auto", (8, 9), (8, 9), False),
        ("off", (9, 0), (9, 0), False),
        ("on", (9, 0), None, True),
    ],
)
def test_kernels_overlap_where_that_is_asked_for_or_was_checked(
    tmp_path, monkeypatch, asked: str, capability: tuple[int, int], checked: tuple[int, int] | None, overlaps: bool
) -> None:
    monkeypatch.setattr(triton_device, "CHECKED", tmp_path)
    monkeypatch.setattr(triton_device, "gpu_of", lambda _: Gpu("Some GPU", capability, 132))
    if checked is not None:
        record = {"device": "Another GPU", "capability": checked, "replays": 1000}
        table_path(tmp_path, "Another GPU").write_text(json.dumps(record))
    assert triton_device.overlaps_kernels(torch.device("cuda"), asked) == overlaps


@pytest.mark.parametrize("gpu", [None, Gpu("Old GPU", (8, 9), 100)])
def test_kernels_that_cannot_overlap_are_refused(monkeypatch, gpu: Gpu | None) -> None:
    monkeypatch.setattr(triton_device, "gpu_of", lambda _: gpu)
    with pytest.raises(ToolkitError) as refused:
        triton_device.overlaps_kernels(torch.device("cpu"), "on")
    assert "--programmatic-launch" in refused.value.remedy
