"""On the trained demo model: rotation undoes outlier channels, and GPTAQ is nearer to the dense model than GPTQ."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.weights import Int, Scheme
from compress.common.cli import demo_model_path
from compress.evaluate.perplexity import cut_windows, evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.methods.rotation import RotateStage
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, QuantizeStage, Recipe, Stage

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
OUTLIERS, FACTOR = 6, 32.0


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with outlier channels behind every norm; powers of two keep it exactly the same function."""
    folder = tmp_path_factory.mktemp("outliers") / "model"
    shutil.copytree(demo_model_path(), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        block, norm = name.removesuffix(".weight").rsplit(".", 1)
        scale = torch.ones(len(tensors[name]), dtype=tensors[name].dtype)
        scale[torch.randperm(len(scale), generator=generator)[:OUTLIERS]] = FACTOR
        tensors[name] *= scale
        for linear in READERS[norm]:
            tensors[f"{block}.{linear}.weight"] /= scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def divergence(model: Path, out: Path, *stages: Stage, tokens: int) -> float:
    """KL to the demo model over a number of tokens."""
    recipe = Recipe(stages, CalibrationOptions("bundled", samples=32, length=512))
    run(prepare(RunRequest(model, str(model), recipe, out, dtype="float32", measure=False)), quiet=True)
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(demo_model_path()), length=512, max_tokens=tokens)
    packed, dense = (RuntimeScorer(path, dtype="float32") for path in (out, demo_model_path()))
    return evaluate(packed, windows, dense).kl_mean


@pytest.mark.full
def test_rotation_undoes_outlier_channels(with_outliers: Path, tmp_path: Path) -> None:
    stage = QuantizeStage("rtn", Int(4, None))
    plain = divergence(with_outliers, tmp_path / "plain", stage, tokens=1024)
    rotated = divergence(with_outliers, tmp_path / "rotated", RotateStage(), stage, tokens=1024)
    assert rotated < 0.6 * plain


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, 2])
def test_gptaq_is_nearer_to_the_dense_model_than_gptq(bits: int, tmp_path: Path) -> None:
    gptaq, gptq = (
        divergence(demo_model_path(), tmp_path / method, QuantizeStage(method, Int(bits, 64)), tokens=16384)
        for method in ("gptaq", "gptq")
    )
    assert gptaq < gptq


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [Int(4, None), Int(3, None), Int(2, 64)], ids=str)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_rotation_is_no_worse_without_outliers(method: str, scheme: Scheme, tmp_path: Path) -> None:
    stage = QuantizeStage(method, scheme)
    plain = divergence(demo_model_path(), tmp_path / "plain", stage, tokens=8192)
    rotated = divergence(demo_model_path(), tmp_path / "rotated", RotateStage(), stage, tokens=8192)
    assert rotated <= plain
