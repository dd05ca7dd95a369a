"""Low rank from a checkpoint to a served one: two factors on disk, two products, sizes as computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from killed_runs import killed_after_block

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int, LowRank, NMSparsity
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import RecipeError, SchemeError, ToolkitError
from compress.evaluate.perplexity import cut_windows, evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.methods import base
from compress.pipeline.compress_layer import decompose_block
from compress.pipeline.finish import compare_with_report
from compress.pipeline.prepare import RunContext, RunRequest, prepare
from compress.pipeline.run import RunResult, run
from compress.plan import Factoring, LayerPlan
from compress.recipe import CalibrationOptions, FactorizeStage, PruneStage, QuantizeStage, Recipe, Stage
from runtime.backends.base import Target
from runtime.core.model_config import parse_config
from runtime.memory.estimate import Weights
from runtime.model.loader import load_model
from runtime.speculative.draft_model import round_layers

SMALL = CalibrationOptions(samples=6, length=48)


def prepared(model: Path, out: Path, *stages: Stage, calibration: CalibrationOptions = SMALL) -> RunContext:
    return prepare(RunRequest(model, str(model), Recipe(stages, calibration), out, measure=False))


def compress(model: Path, out: Path, *stages: Stage, calibration: CalibrationOptions = SMALL) -> RunResult:
    return run(prepared(model, out, *stages, calibration=calibration), quiet=True)


@pytest.mark.parametrize("method", ["svd-llm", "asvd", "svd"])
@pytest.mark.parametrize("quantize", [None, QuantizeStage("rtn", Int(8, None)), QuantizeStage("gptq", Int(4, 8))])
def test_factors_are_packed_verified_and_served(tiny_model, tmp_path, method, quantize) -> None:
    source, out = tiny_model("llama"), tmp_path / "packed"
    stages = [FactorizeStage(method, 0.8, "uniform"), *([quantize] if quantize else [])]
    plan = prepared(source, out, *stages).plan
    result = compress(source, out, *stages)
    assert result.structure.ok
    packed = PackedCheckpoint.open(out)
    assert packed.format == "compress-runtime"
    assert packed.schemes == dict(sorted(plan.schemes.items()))
    # Uniform ranks are known before: the plan is exact.
    assert result.structure.bits_per_weight == pytest.approx(plan.bits_per_weight, rel=1e-12)
    assert result.structure.quantized_bytes * 8 == sum(
        scheme.stored_bits(*packed.shape(module), 8 * packed.dtype.itemsize)
        for module, scheme in packed.schemes.items()
    )
    for module in packed.modules:
        weight = packed.weight(module)
        assert isinstance(weight, LowRankWeight)
        rows, columns = weight.shape
        assert weight.scheme.rank * (rows + columns) <= 0.8 * rows * columns
    assert verify_structure(out).ok
    assert compare_with_report(out) == []
    tokens = torch.randint(10, 4000, (1, 32), generator=torch.Generator().manual_seed(0))
    served = RuntimeScorer(out, dtype="float32").logits(tokens)
    dense = export_checkpoint(out, "dense", tmp_path / "dense")
    assert not PackedCheckpoint.open(dense).schemes
    # The dense export rounds the product of the factors to the model's dtype.
    torch.testing.assert_close(RuntimeScorer(dense, dtype="float32").logits(tokens), served, rtol=0, atol=0.06)


@pytest.mark.parametrize("family", ["llama_biased", "qwen2", "qwen3", "mistral"])
def test_biases_and_other_families(tiny_model, tmp_path, family) -> None:
    out = tmp_path / "packed"
    compress(tiny_model(family), out, FactorizeStage("asvd", 0.6), QuantizeStage("gptq", Int(8, None)))
    tokens = torch.randint(10, 4000, (1, 32), generator=torch.Generator().manual_seed(0))
    served = RuntimeScorer(out, dtype="float32").logits(tokens)
    dense = export_checkpoint(out, "dense", tmp_path / "dense")
    torch.testing.assert_close(RuntimeScorer(dense, dtype="float32").logits(tokens), served, rtol=0, atol=0.06)


def test_rounding_by_gptq_loses_less_than_to_nearest(tiny_model, tmp_path) -> None:
    stage, errors = FactorizeStage("svd-llm", 0.8, "uniform"), {}
    for method in ("gptq", "rtn"):
        out = tmp_path / method
        blocks = compress(tiny_model("llama"), out, stage, QuantizeStage(method, Int(4, None))).report["blocks"]
        errors[method] = blocks[0]["relative_error"]
    assert errors["gptq"] < errors["rtn"]


def test_factorized_layers_stand_beside_smoothed_ones(tiny_model, tmp_path) -> None:
    """AWQ folds o_proj's scales into v_proj before v_proj is decomposed."""
    errors = {}
    for method in ("awq", "rtn"):
        out = tmp_path / method
        quantize = QuantizeStage(method, Int(4, 64), ignore=("v_proj",))
        result = compress(
            tiny_model("llama", num_key_value_heads=4),
            out,
            FactorizeStage("svd-llm", 0.8, targets=("v_proj",)),
            quantize,
        )
        assert result.structure.ok
        assert PackedCheckpoint.open(out).schemes["model.layers.0.self_attn.v_proj"].rank
        block = result.report["blocks"][0]
        assert any("v_proj" in each["source"] for each in block["smoothing"]) == (method == "awq")
        errors[method] = block["relative_error"]
    assert errors["awq"] < 1.02 * errors["rtn"]


def test_unreached_layers_say_that_they_were_decomposed_plainly() -> None:
    ranked = decompose_block(
        {"up": torch.randn(32, 64)},
        {"up": LayerPlan(None, LowRank(None, 8), factoring=Factoring(base.factorization("svd-llm"), 0.8))},
        {},
    )
    assert ranked["up"].rank == 8
    assert ranked["up"].whitening.recovery == "svd: no calibration token reached this layer"


def test_served_as_two_products_that_are_not_fused(tiny_model, tmp_path) -> None:
    out = tmp_path / "packed"
    compress(tiny_model("llama"), out, FactorizeStage("svd", 0.5, "uniform", targets=("q_proj", "down_proj")))
    model = load_model(out, dtype="float32")
    assert any("q_proj, right factor" in line for line in model.description)
    assert any("down_proj, left factor" in line for line in model.description)
    assert any("gate_proj+up_proj" in line for line in model.description)
    checkpoint = PackedCheckpoint.open(out)
    target = Target(torch.device("cpu"), torch.float32)
    weights = Weights(checkpoint, parse_config(checkpoint.config, {}), target, "auto", 2**30)
    layers = [part for each in model.layers for part in (each.qkv, each.output, each.gate_up, each.down)]
    outside = model.embedding.nbytes + model.head.nbytes
    assert weights.prepared() == outside + sum(part.nbytes for part in layers)


@pytest.mark.parametrize("bits", [None, 8])
def test_self_drafts_by_rounding_multiply_factors_out(tiny_model, tmp_path, bits) -> None:
    out = tmp_path / "packed"
    quantize = [QuantizeStage("rtn", Int(bits, None))] if bits else []
    compress(tiny_model("llama"), out, FactorizeStage("svd", 0.8, "uniform"), *quantize)
    target = load_model(out, dtype="float32")
    assert any("w4a16" in line for line in round_layers(target, out, 4).description)
    if bits:
        with pytest.raises(ToolkitError, match="bits already"):
            round_layers(target, out, 8)


def test_blocks_share_their_ranks_out_and_keep_what_would_not_shrink(tmp_path) -> None:
    out = tmp_path / "packed"
    calibration = CalibrationOptions(samples=8, length=128)
    result = compress(demo_model_path(), out, FactorizeStage("svd-llm", 0.8), calibration=calibration)
    assert result.structure.ok
    assert result.structure.total_bytes == pytest.approx(result.report["plan"]["bytes_after"], rel=0.02)
    assert compare_with_report(out) == []
    linears = [linear for block in result.report["blocks"] for linear in block["linears"]]
    whole = {linear["module"] for linear in linears if linear["kept_whole"]}
    ranked = {linear["module"]: linear["rank"] for linear in linears if linear["rank"]}
    assert whole
    assert ranked
    assert len(whole) + len(ranked) == 42
    packed, dense = PackedCheckpoint.open(out), PackedCheckpoint.open(demo_model_path())
    assert {module: scheme.rank for module, scheme in packed.schemes.items()} == ranked
    assert len(set(ranked.values())) > 3
    for module in whole:
        assert torch.equal(packed.weight(module), dense.weight(module))
    assert {tensor.name: tensor.reason for tensor in result.structure.dense}[
        f"{min(whole)}.weight"
    ] == "kept whole: the weights that its rank would need are no fewer than its own"
    for index in range(6):
        shapes = {name: dense.shape(name) for name in (*ranked, *whole) if name.startswith(f"model.layers.{index}.")}
        before = {name: rows * columns for name, (rows, columns) in shapes.items()}
        kept = sum(ranked[name] * sum(shapes[name]) if name in ranked else before[name] for name in before)
        assert 0.78 < kept / sum(before.values()) <= 0.8


def test_layers_kept_whole_are_quantized_like_others(tmp_path) -> None:
    out = tmp_path / "packed"
    stages = FactorizeStage("svd", 0.8), QuantizeStage("rtn", Int(4, 32))
    result = compress(demo_model_path(), out, *stages)
    assert result.structure.total_bytes == pytest.approx(result.report["plan"]["bytes_after"], rel=0.02)
    schemes = PackedCheckpoint.open(out).schemes
    assert len(schemes) == 42
    assert Int(4, 32) in schemes.values()
    assert any(scheme.rank for scheme in schemes.values())
    assert result.structure.ok
    assert compare_with_report(out) == []


def test_an_interrupted_run_goes_on_to_the_same_bytes(tiny_model, tmp_path) -> None:
    source, stage = tiny_model("llama"), FactorizeStage("svd-llm", 0.6)
    compress(source, tmp_path / "whole", stage)
    with killed_after_block(0):
        compress(source, tmp_path / "parts", stage)
    compress(source, tmp_path / "parts", stage)
    whole, parts = (tmp_path / each / "model.safetensors" for each in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.full
def test_whitened_beats_scaled_beats_plain_on_the_trained_model(tmp_path) -> None:
    """At equal size: uniform ranks, 80 % of the weights, 2,048 tokens of other text than the calibration's."""
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(demo_model_path()), length=256, max_tokens=2048)
    dense = RuntimeScorer(demo_model_path(), dtype="float32")
    kl = {}
    for method, allocation in (("svd-llm", "block"), ("svd-llm", "uniform"), ("asvd", "uniform"), ("svd", "uniform")):
        out = tmp_path / f"{method}-{allocation}"
        calibration = CalibrationOptions(samples=8, length=256)
        compress(demo_model_path(), out, FactorizeStage(method, 0.8, allocation), calibration=calibration)
        kl[method, allocation] = evaluate(RuntimeScorer(out, dtype="float32"), windows, dense).kl_mean
    assert kl["svd-llm", "uniform"] < 0.7 * kl["asvd", "uniform"]
    assert kl["asvd", "uniform"] < kl["svd", "uniform"]
    assert kl["svd-llm", "block"] < 0.8 * kl["svd-llm", "uniform"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "svdllm"}, "'svd-llm'"),
        ({"keep": 1.0}, r"between 0.*1"),
        ({"allocation": "layer"}, "'layer'"),
    ],
)
def test_stages_that_mean_nothing_are_refused(options, problem) -> None:
    with pytest.raises(RecipeError, match=problem):
        FactorizeStage(**options)


@pytest.mark.parametrize(
    ("stages", "error", "problem"),
    [
        ((PruneStage("magnitude", NMSparsity(2, 4)), FactorizeStage("svd")), RecipeError, "is pruned and factorized"),
        ((FactorizeStage("svd"), QuantizeStage("awq", Int(4, 8))), RecipeError, "awq is not for factors"),
        ((FactorizeStage("svd"), QuantizeStage("rtn", Int(4, 64))), SchemeError, "are multiples of 64"),
    ],
)
def test_stages_that_do_not_go_together_are_refused(tiny_model, tmp_path, stages, error, problem) -> None:
    with pytest.raises(error, match=problem):
        prepared(tiny_model("llama"), tmp_path / "packed", *stages)


def test_factors_export_only_dense(tiny_model, tmp_path) -> None:
    compress(tiny_model("llama"), tmp_path / "packed", FactorizeStage("svd", 0.5, "uniform"))
    with pytest.raises(SchemeError, match="two factors"):
        export_checkpoint(tmp_path / "packed", "compressed-tensors", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_broken_factors_are_found(tiny_model, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    out = tmp_path / "packed"
    compress(tiny_model("llama"), out, FactorizeStage("svd", 0.5, "uniform"))
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.right.weight"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert "model.layers.0.mlp.up_proj.right holds NaN or infinity" in verify_structure(out).problems
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert any("contradict each other" in problem for problem in verify_structure(out).problems)
