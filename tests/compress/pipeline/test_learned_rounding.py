"""Learned rounding in a run: it lowers the block's error or keeps its start, and refuses what it cannot do."""

from pathlib import Path

import pytest
import torch
from runs import compress

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.methods.signround import SignRoundOptions
from compress.recipe import CalibrationOptions, QuantizeStage

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
