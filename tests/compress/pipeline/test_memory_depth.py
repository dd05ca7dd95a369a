"""Peak memory follows the width of a model, not its depth."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import prepared
from tiny_models import pack_model

from compress.checkpoint.weights import BlockFp8, Int, Scheme
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage

GPTQ = QuantizeStage("gptq", Int(4, 64))
ROOT = Path(__file__).parents[3]

# Prints the peak resident memory of a run in MB, mapped files included.
MEASURE = """
import sys
from pathlib import Path
import torch
from compress.checkpoint.weights import Int
from compress.pipeline.run import run
from compress.pipeline.prepare import RunRequest, prepare
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.quantize import QuantizeStage

model, out = map(Path, sys.argv[1:3])
recipe = Recipe((QuantizeStage(sys.argv[3], Int(4, 64)),), CalibrationOptions(samples=4, length=64))
run(prepare(RunRequest(model, "test", recipe, out, devices=sys.argv[4], micro_batch=1, measure=False)), quiet=True)
# Not ru_maxrss: that one starts from the memory of the process that forked this one.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) / 1024)
"""


def peak_megabytes(model: Path, out: Path, method: str = "gptq", devices: str = "cpu") -> float:
    command = [sys.executable, "-c", MEASURE, str(model), str(out), method, devices]
    # Every larger allocation gets pages of its own, so the peak is what was in use and not what the C library kept.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    return float(finished.stdout.split()[-1])


def quantized(model: Path, out: Path, scheme: Scheme) -> Path:
    pack_model(model, out, lambda module: scheme, "fp8")
    for file in model.glob("tokenizer*"):
        shutil.copy(file, out)
    return out


@pytest.mark.full
@pytest.mark.parametrize("scheme", [None, BlockFp8()], ids=str)
def test_peak_memory_of_6_blocks_is_that_of_2(tiny_model, tmp_path, scheme) -> None:
    """Weights of a quantized source are dequantized one by one."""
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    peaks, sizes = {}, {}
    for layers in (2, 6):
        model = tiny_model(dtype=torch.float32, num_hidden_layers=layers, **size)
        sizes[layers] = (model / "model.safetensors").stat().st_size / 2**20
        if scheme is not None:
            model = quantized(model, tmp_path / f"source{layers}", scheme)
        peaks[layers] = peak_megabytes(model, tmp_path / str(layers))
    extra = sizes[6] - sizes[2]
    assert extra > 35
    # Were all blocks resident, four more would add at least their own bytes.
    assert peaks[6] - peaks[2] < 0.25 * extra, (peaks, sizes)


@pytest.mark.full
def test_a_worker_adds_less_than_a_block_at_any_depth(tiny_model, tmp_path) -> None:
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    peaks = {}
    for layers, devices in ((2, "cpu"), (2, "cpu,cpu,cpu"), (6, "cpu,cpu,cpu")):
        model = tiny_model(dtype=torch.float32, num_hidden_layers=layers, **size)
        peaks[layers, devices] = peak_megabytes(model, tmp_path / f"{layers}{devices}", devices=devices)
        numbers = sum(each.numel() for each in prepared(model, tmp_path / "out", GPTQ).skeleton.blocks[0].parameters())
    # Weights in the dtype of computation, and float32 masters.
    block = numbers * 8 / 2**20
    assert peaks[2, "cpu,cpu,cpu"] - peaks[2, "cpu"] < 2 * block, (peaks, block)
    assert peaks[6, "cpu,cpu,cpu"] - peaks[2, "cpu,cpu,cpu"] < block, (peaks, block)


def wide_mixture(tiny_model, experts: int) -> Path:
    sizes = {"hidden_size": 512, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 2, "num_experts": experts}
    return tiny_model("mixtral", dtype=torch.float32, num_local_experts=experts, **sizes)


def test_the_estimate_counts_the_block_with_experts_and_the_hessian_of_one(tiny_model, tmp_path) -> None:
    """The first block of GLM-4.5 is dense."""
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 512}
    few, many = (
        prepared(tiny_model("glm4_moe", n_routed_experts=count, num_experts=count, **sizes), tmp_path / "out", GPTQ)
        for count in (8, 16)
    )
    numbers = [sum(each.numel() for each in context.skeleton.blocks[1].parameters()) for context in (few, many)]
    extra = (numbers[1] - numbers[0]) * (few.dtype.itemsize + 4)
    assert many.peak_memory - few.peak_memory == extra


@pytest.mark.full
def test_peak_memory_of_a_mixture_is_foreseen(tiny_model, tmp_path) -> None:
    """Were the Hessians of all experts in memory at once, 56 more would add as many megabytes."""
    peaks, foreseen = {}, {}
    for experts in (8, 64):
        model, out = wide_mixture(tiny_model, experts), tmp_path / str(experts)
        calibration = CalibrationOptions(samples=4, length=64)
        foreseen[experts] = prepared(model, out, GPTQ, calibration=calibration).peak_memory / 2**20
        peaks[experts] = peak_megabytes(model, out)
        assert peaks[experts] < foreseen[experts]
    # Codes and mapped pages of the source are not in the estimate.
    assert peaks[64] - peaks[8] < 1.5 * (foreseen[64] - foreseen[8]), (peaks, foreseen)


@pytest.mark.full
def test_peak_memory_beside_a_large_vocabulary_is_foreseen(tiny_model, tmp_path) -> None:
    """Embedding and head are copied and checked without a copy in float32, and their mapped pages are given back."""
    sizes = {"hidden_size": 512, "vocab_size": 192 * 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = tiny_model(dtype=torch.bfloat16, tie_word_embeddings=False, **sizes)
    foreseen = prepared(model, tmp_path / "out", QuantizeStage("rtn", Int(4, 64))).peak_memory / 2**20
    assert (model / "model.safetensors").stat().st_size > 400 * 10**6
    assert peak_megabytes(model, tmp_path / "out", "rtn") < foreseen
