"""SmoothQuant from a checkpoint to a served one: outliers are moved into weights, and everyone loads the result."""

from functools import partial
from pathlib import Path

import pytest
import runs
import torch
from runs import compared_with, some_tokens, with_outliers

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Activations, Int
from compress.common.cli import demo_model_path
from compress.evaluate.scorers import RuntimeScorer
from compress.methods.smoothquant import SmoothQuantOptions
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage

W8A8 = Int(8, None, activations=Activations.INT8)


@pytest.fixture(scope="module")
def outlier_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_outliers(demo_model_path(), tmp_path_factory.mktemp("outliers") / "model", [11], 256.0)


compress = partial(runs.compress, calibration=CalibrationOptions(samples=16, length=256), dtype="float32")


@pytest.mark.full
def test_outliers_cost_little_after_smoothing(outlier_model, tmp_path) -> None:
    kl = {}
    for method in ("rtn", "smoothquant"):
        result = compress(outlier_model, tmp_path / method, QuantizeStage(method, W8A8))
        assert result.structure.ok
        kl[method] = compared_with(outlier_model, tmp_path / method, tokens=2048).kl_mean
    assert kl["smoothquant"] < 0.1 * kl["rtn"]
    smoothing = [edge for block in result.report["blocks"] for edge in block["smoothing"]]
    assert all(edge["loss_after"] <= edge["loss_before"] for edge in smoothing)
    norm_edges = [edge for edge in smoothing if "layernorm" in edge["source"]]
    assert all(edge["loss_after"] < 0.5 * edge["loss_before"] for edge in norm_edges)
    # An alpha of its own for each edge, not one for the model.
    assert len({edge["ratio"] for edge in smoothing}) > 1


@pytest.mark.full
def test_transformers_serves_it_too(outlier_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "packed"
    compress(outlier_model, out, QuantizeStage("smoothquant", W8A8, options=SmoothQuantOptions(0.5)))
    assert set(PackedCheckpoint.open(out).schemes.values()) == {W8A8}
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(some_tokens(64)).logits.log_softmax(-1)
    ours = RuntimeScorer(out, dtype="float32").logits(some_tokens(64)).log_softmax(-1)
    # compressed-tensors divides a token's range by 127.5, this runtime and vLLM by 127: close, not equal.
    assert (expected.exp() * (expected - ours)).sum(-1).mean() < 0.005


def test_a_fixed_alpha_is_used_everywhere(outlier_model, tmp_path) -> None:
    result = compress(
        outlier_model, tmp_path / "packed", QuantizeStage("smoothquant", W8A8, options=SmoothQuantOptions(0.75))
    )
    assert {edge["ratio"] for block in result.report["blocks"] for edge in block["smoothing"]} == {0.75}
