"""HQQ and GPTAQ through the whole pipeline."""

from pathlib import Path

import pytest
import torch
from killed_runs import killed_after_block

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.errors import RecipeError
from compress.methods.base import make_options, quantization
from compress.methods.gptaq import GPTAQOptions
from compress.methods.hqq import quantize_hqq
from compress.pipeline import compress_block
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import RunResult, run
from compress.recipe import CalibrationOptions, QuantizeStage, Recipe

CALIBRATION = CalibrationOptions(samples=4, length=64)


def compress(model: Path, out: Path, *stages, **options) -> RunResult:
    recipe = Recipe(tuple(stages), CALIBRATION)
    return run(prepare(RunRequest(model, str(model), recipe, out, measure=False, **options)), quiet=True)


def test_hqq_needs_no_calibration_and_writes_its_codes(tiny_model, tmp_path: Path) -> None:
    model, scheme = tiny_model(), Int(3, 64, symmetric=False)
    stage = QuantizeStage("hqq", scheme)
    assert not stage.needs_calibration
    result = compress(model, tmp_path / "out", stage)
    assert {linear["method"] for block in result.report["blocks"] for linear in block["linears"]} == {"hqq"}
    packed, source = PackedCheckpoint.open(tmp_path / "out"), PackedCheckpoint.open(model)
    name = "model.layers.1.mlp.down_proj"
    expected = quantize_hqq(source.tensor(f"{name}.weight").float(), scheme)
    assert packed.weight(name).qweight.equal(expected.qweight)
    assert packed.weight(name).zero_points.equal(expected.zero_points)


def gptaq(bits: int = 2, alpha: float | None = None, **options) -> QuantizeStage:
    return QuantizeStage("gptaq", Int(bits, 64), options=GPTAQOptions(alpha), **options)


def codes(path: Path, module: str) -> torch.Tensor:
    return PackedCheckpoint.open(path).weight(module).qweight


def test_gptaq_is_gptq_in_the_first_block_and_not_in_the_next(tiny_model, tmp_path: Path) -> None:
    model = tiny_model()
    result = compress(model, tmp_path / "gptaq", gptaq())
    compress(model, tmp_path / "gptq", QuantizeStage("gptq", Int(2, 64)))
    first, later = "model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"
    assert codes(tmp_path / "gptaq", first).equal(codes(tmp_path / "gptq", first))
    assert not codes(tmp_path / "gptaq", later).equal(codes(tmp_path / "gptq", later))
    assert result.report["recovered"] == []


def test_only_gptaq_follows_the_dense_model_and_counts_what_that_takes(tiny_model, tmp_path: Path) -> None:
    recipes = {name: Recipe((QuantizeStage(name, Int(2, 64)),), CALIBRATION) for name in ("gptq", "gptaq")}
    model = tiny_model()
    plain, beside = (prepare(RunRequest(model, "m", each, tmp_path / "out")) for each in recipes.values())
    assert not plain.plan.needs.dense_inputs
    assert beside.plan.needs.dense_inputs
    assert beside.peak_memory > plain.peak_memory
    states = beside.sequences.tokens.numel() * 128 * beside.dtype.itemsize
    assert beside.disk - plain.disk == 2 * states


def test_a_killed_run_of_gptaq_continues_to_the_same_bytes(tiny_model, tmp_path: Path) -> None:
    model, stages = tiny_model(), (gptaq(), gptaq(3, targets=("down_proj",)))
    compress(model, tmp_path / "whole", *stages)
    with killed_after_block(1):
        compress(model, tmp_path / "killed", *stages)
    compress(model, tmp_path / "killed", *stages)
    whole, killed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed"))
    assert whole == killed


def test_memory_that_runs_out_halves_the_batch_of_both_streams(tiny_model, tmp_path: Path, monkeypatch) -> None:
    model = tiny_model()
    followed = compress_block.follow_dense
    attempts: list[int] = []

    def run_out_once(block, inputs, *rest):
        attempts.append(inputs.micro_batch)
        if len(attempts) == 2:
            raise MemoryError
        return followed(block, inputs, *rest)

    monkeypatch.setattr(compress_block, "follow_dense", run_out_once)
    result = compress(model, tmp_path / "short", gptaq(), micro_batch=4)
    assert attempts[:3] == [4, 4, 2]
    assert [block["micro_batch"] for block in result.report["blocks"]] == [4, 2, 2]


def test_what_alpha_means_depends_on_the_method() -> None:
    assert gptaq(alpha=0.25).options.alpha == 0.25
    with pytest.raises(RecipeError, match=r"alpha=2\.0 with gptaq"):
        gptaq(alpha=2.0)
    with pytest.raises(RecipeError, match="keeps no outlier columns"):
        gptaq(outlier_columns=0.01)
    with pytest.raises(RecipeError, match=r"alpha=0\.5 .* gptq"):
        make_options(quantization("gptq"), {"alpha": 0.5})
