"""Learned rounding, HQQ and GPTAQ in runs: reported, kept when nothing is better, refused where they cannot be."""

from pathlib import Path

import pytest
import torch
from runs import compress, prepared

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.errors import RecipeError
from compress.methods.base import QUANTIZATION, make_options
from compress.methods.gptaq import GPTAQOptions
from compress.methods.hqq import quantize_hqq
from compress.methods.signround import SignRoundOptions
from compress.pipeline import compress_block
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage

SHORT = SignRoundOptions(steps=20, lr=0.002, batch=3)


def same_weights(left: Path, right: Path) -> bool:
    first, second = PackedCheckpoint.open(left), PackedCheckpoint.open(right)
    return all(torch.equal(first.weight(each).qweight, second.weight(each).qweight) for each in first.modules)


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@pytest.mark.parametrize("scheme", [Int(2, 32), Int(3, None, symmetric=False)], ids=str)
def test_learning_is_reported_and_what_is_written_verifies(tiny_model, tmp_path, family, scheme) -> None:
    result = compress(tiny_model(family), tmp_path / "packed", QuantizeStage("signround", scheme, options=SHORT))
    assert result.structure.ok
    for block in result.report["blocks"]:
        tuning = block["tuning"]
        assert tuning["steps"] == SHORT.steps
        assert tuning["loss_after"] <= tuning["loss_before"]
        assert (tuning["changed"] > 0) == (tuning["best_step"] > 0)
        assert {linear["method"] for linear in block["linears"]} == {"signround"}


@pytest.mark.full
def test_learning_lowers_the_error_of_a_trained_model(tmp_path) -> None:
    stage = QuantizeStage("signround", Int(2, 64), options=SignRoundOptions(steps=10, lr=0.005, batch=4))
    text = CalibrationOptions(samples=16, length=64)
    report = compress(demo_model_path(), tmp_path / "packed", stage, calibration=text).report
    gains = [block["tuning"]["loss_after"] / block["tuning"]["loss_before"] for block in report["blocks"]]
    assert min(gains) < 0.95


@pytest.mark.full
def test_the_number_of_sequences_in_memory_changes_nothing_but_last_bits(tiny_model, tmp_path) -> None:
    stage = QuantizeStage("signround", Int(3, 32), options=SignRoundOptions(steps=6, batch=4))
    reports = [
        compress(tiny_model(), tmp_path / str(size), stage, micro_batch=size, dtype="float32").report for size in (2, 4)
    ]
    losses = [[block["tuning"]["loss_before"] for block in report["blocks"][:1]] for report in reports]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_start_that_cannot_be_bettered_is_kept_and_that_is_said(tiny_model, tmp_path) -> None:
    wild = SignRoundOptions(steps=1, lr=0.5, batch=1)
    result = compress(tiny_model(), tmp_path / "tuned", QuantizeStage("signround", Int(8, 32), options=wild))
    compress(tiny_model(), tmp_path / "gptq", QuantizeStage("gptq", Int(8, 32)))
    assert same_weights(tmp_path / "tuned", tmp_path / "gptq")
    assert len(result.report["recovered"]) == len(PackedCheckpoint.open(tmp_path / "gptq").modules)
    assert "did not lower" in result.report["recovered"][0]["recovery"]


@pytest.mark.full
def test_goes_with_other_methods_in_the_same_block(tiny_model, tmp_path) -> None:
    stages = (
        QuantizeStage("awq", Int(4, 32)),
        QuantizeStage("signround", Int(2, 32), targets=("down_proj",), options=SHORT),
    )
    result = compress(tiny_model(), tmp_path / "packed", *stages)
    assert result.structure.ok
    methods = {
        linear["module"].rpartition(".")[2]: linear["method"] for linear in result.report["blocks"][0]["linears"]
    }
    assert methods["down_proj"] == "signround"
    assert methods["q_proj"] == "awq"
    assert result.report["blocks"][0]["tuning"]["steps"] == SHORT.steps


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
    stages = (QuantizeStage(name, Int(2, 64)) for name in ("gptq", "gptaq"))
    plain, beside = (prepared(tiny_model(), tmp_path / "out", each) for each in stages)
    assert not plain.plan.needs.dense_inputs
    assert beside.plan.needs.dense_inputs
    assert beside.peak_memory > plain.peak_memory
    states = beside.sequences.tokens.numel() * 128 * beside.dtype.itemsize
    assert beside.disk - plain.disk == 2 * states


@pytest.mark.full
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
    with pytest.raises(RecipeError, match=r"alpha=2\.0 .*at most 1"):
        gptaq(alpha=2.0)
    with pytest.raises(RecipeError, match=r"^gptaq .*outlier.*rtn"):
        gptaq(outlier_columns=0.01)
    with pytest.raises(RecipeError, match=r"alpha=0\.5 .* gptq"):
        make_options(QUANTIZATION.find("gptq"), {"alpha": 0.5})
