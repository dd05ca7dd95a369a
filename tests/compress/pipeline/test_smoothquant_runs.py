"""SmoothQuant from a checkpoint to a served one: outliers are moved into weights, and everyone loads the result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Activations, Int
from compress.common.cli import demo_model_path
from compress.common.errors import RecipeError
from compress.evaluate.perplexity import cut_windows, evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.methods.smoothquant import SmoothQuantOptions
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import RunResult, run
from compress.recipe import CalibrationOptions, QuantizeStage, Recipe

W8A8 = Int(8, None, activations=Activations.INT8)
SMALL = CalibrationOptions(samples=16, length=256)
OUTLIER = 256.0


@pytest.fixture(scope="module")
def outlier_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, its function unchanged, with activation outliers as large models have them: in each block one
    channel of each norm's output is very large, and the weights that read it are small."""
    folder = tmp_path_factory.mktemp("outliers") / "model"
    shutil.copytree(demo_model_path(), folder)
    tensors = load_file(folder / "model.safetensors")
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for name in [name for name in tensors if name.rpartition(".")[0].endswith(tuple(readers))]:
        block, norm = name.removesuffix(".weight").rsplit(".", 1)
        tensors[name][11] *= OUTLIER
        for reader in readers[norm]:
            tensors[f"{block}.{reader}.weight"][:, 11] /= OUTLIER
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def compress(model: Path, out: Path, stage: QuantizeStage) -> RunResult:
    request = RunRequest(model, str(model), Recipe((stage,), SMALL), out, dtype="float32", measure=False)
    return run(prepare(request), quiet=True)


@pytest.mark.full
def test_outliers_cost_little_after_smoothing(outlier_model, tmp_path) -> None:
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(outlier_model), length=256, max_tokens=2048)
    dense = RuntimeScorer(outlier_model, dtype="float32")
    kl = {}
    for method in ("rtn", "smoothquant"):
        result = compress(outlier_model, tmp_path / method, QuantizeStage(method, W8A8))
        assert result.structure.ok
        kl[method] = evaluate(RuntimeScorer(tmp_path / method, dtype="float32"), windows, dense).kl_mean
    assert kl["smoothquant"] < 0.1 * kl["rtn"]
    smoothing = [edge for block in result.report["blocks"] for edge in block["smoothing"]]
    assert all(edge["loss_after"] <= edge["loss_before"] for edge in smoothing)
    norm_edges = [edge for edge in smoothing if "layernorm" in edge["source"]]
    assert all(edge["loss_after"] < 0.5 * edge["loss_before"] for edge in norm_edges)
    # An alpha of its own for each edge, not one for the model.
    assert len({edge["ratio"] for edge in smoothing}) > 1


def test_transformers_serves_it_too(outlier_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "packed"
    compress(outlier_model, out, QuantizeStage("smoothquant", W8A8, options=SmoothQuantOptions(0.5)))
    assert set(PackedCheckpoint.open(out).schemes.values()) == {W8A8}
    tokens = torch.randint(10, 4000, (1, 64), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(tokens).logits
    ours = RuntimeScorer(out, dtype="float32").logits(tokens)
    # compressed-tensors divides a token's range by 127.5, this runtime and vLLM by 127: close, not equal.
    divergence = torch.nn.functional.kl_div(
        ours.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
    )
    assert divergence.sum(-1).mean() < 0.005


def test_a_fixed_alpha_is_used_everywhere(outlier_model, tmp_path) -> None:
    result = compress(
        outlier_model, tmp_path / "packed", QuantizeStage("smoothquant", W8A8, options=SmoothQuantOptions(0.75))
    )
    assert {edge["ratio"] for block in result.report["blocks"] for edge in block["smoothing"]} == {0.75}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "smoothquant", "scheme": Int(8, None)}, "8-bit"),
        ({"method": "awq", "options": SmoothQuantOptions(0.5)}, "no options of awq"),
    ],
)
def test_stages_that_mean_nothing_are_refused(options, problem) -> None:
    with pytest.raises(RecipeError, match=problem):
        QuantizeStage(**options)


def test_an_exponent_outside_its_range_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"alpha=1\.5"):
        SmoothQuantOptions(1.5)
