"""Inputs that a checkpoint of another tool rounds: evaluated so, and served in 16 bits with one line that says it."""

import shutil
from pathlib import Path

import pytest
import torch
from folders import change_config
from runs import compress
from safetensors.torch import load_file, save_file

from compress.checkpoint.activations import AS_STORED, SIXTEEN_BITS
from compress.checkpoint.dequantized import open_source
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Mxfp4
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, ToolkitError
from compress.doctor.examine import examine
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.stages.quantize import QuantizeStage
from runtime.activations import choose_activations
from runtime.backends.registry import REFERENCE
from runtime.core.config import RuntimeConfig
from runtime.llm import LLM
from runtime.model.loader import load_model
from runtime.model.scoring import score

PEERS = Path(__file__).parents[1] / "data" / "peers"
STATIC = PEERS / "llm-compressor-fp8-static"
INPUTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": True}


@pytest.fixture(scope="module")
def w4a4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in MXFP4, with inputs described as llm-compressor describes those of W4A4."""
    folder = tmp_path_factory.mktemp("models") / "packed"
    compress(demo_model_path(), folder, QuantizeStage("rtn", Mxfp4()))
    block = PackedCheckpoint.open(folder).config["quantization_config"]
    for group in block["config_groups"].values():
        group["input_activations"] = INPUTS | {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    change_config(folder, quantization_config=block)
    return folder


def test_it_is_served_in_16_bits_and_one_line_says_so(w4a4: Path) -> None:
    engine = LLM(w4a4, RuntimeConfig(device="cpu", num_blocks=64)).engine
    lines = [line for line in engine.runner.decoder.description if "inputs" in line or line.startswith("activations")]
    assert len(lines) == 1
    assert "fp4 g32" in lines[0]


def test_both_are_evaluated(w4a4: Path) -> None:
    request = EvaluationRequest(w4a4, demo_model_path(), max_tokens=512, length=128, device="cpu", dtype="float32")
    rounded = run_evaluation(request)
    kept = run_evaluation(EvaluationRequest(**vars_of(request) | {"activations": SIXTEEN_BITS}))
    assert (rounded.request.activations, kept.request.activations) == (AS_STORED, SIXTEEN_BITS)
    assert rounded.result.kl_mean > 1.2 * kept.result.kl_mean
    assert not rounded.warnings
    assert len(kept.warnings) == 1


def vars_of(request: EvaluationRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in EvaluationRequest.__slots__}


@pytest.mark.parametrize("asked", [AS_STORED, "auto"])
def test_reference_kernels_compute_what_is_stored(asked: str) -> None:
    choice = choose_activations(STATIC, asked, device="cpu", kernels=REFERENCE)
    assert (choice.kernels, choice.activations) == (REFERENCE, AS_STORED)
    with pytest.raises(ToolkitError):
        choose_activations(STATIC, SIXTEEN_BITS, device="cpu", kernels=REFERENCE)


def test_a_named_kernel_keeps_inputs() -> None:
    with pytest.raises(ToolkitError) as refused:
        choose_activations(STATIC, AS_STORED, device="cpu", kernels="cpu_fp8")
    assert REFERENCE in refused.value.remedy


def test_projections_with_scales_of_their_own_are_rounded_by_them(tmp_path: Path) -> None:
    """The linears of queries, keys and values are one product where they share the scale of their input."""
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.input_scale"
    tokens = load_file(tmp_path / "expected.safetensors")["tokens"]
    before = score(load_model(tmp_path, device="cpu", kernels=AS_STORED), tokens)
    save_file(tensors | {name: tensors[name] / 64}, tmp_path / "model.safetensors")
    found = [score(load_model(tmp_path, device="cpu", kernels=kernels), tokens) for kernels in (AS_STORED, REFERENCE)]
    assert torch.allclose(*found, atol=1e-5)
    assert not torch.allclose(found[0], before, atol=1e-2)


@pytest.mark.parametrize("scale", [None, 0.0])
def test_a_missing_or_dead_scale_is_refused(scale: float | None, tmp_path: Path) -> None:
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.input_scale"
    stored = tensors.pop(name)
    save_file(tensors if scale is None else tensors | {name: stored * scale}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError):
        load_model(tmp_path, device="cpu", kernels=AS_STORED)
    load_model(tmp_path, device="cpu")


def test_rounding_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    shutil.copytree(PEERS / "auto-round-mxfp4", tmp_path, dirs_exist_ok=True)
    block = PackedCheckpoint.open(tmp_path).config["quantization_config"]
    change_config(tmp_path, quantization_config=block | {"act_data_type": "mx_int"})
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path, device="cpu", kernels=AS_STORED)
    assert SIXTEEN_BITS in refused.value.remedy
    load_model(tmp_path, device="cpu")


def test_doctor_shows_what_the_file_says_and_what_is_computed(w4a4: Path) -> None:
    facts = examine(w4a4).facts
    assert "fp4 g32 e8m0" in facts["inputs"]
    assert AS_STORED in facts["inputs"]


def test_a_source_of_compression_says_that_inputs_keep_16_bits(w4a4: Path) -> None:
    files, _ = open_source(w4a4)
    assert sum("inputs" in line for line in files.notes) == 1
