"""A first pass over the model decides how much of each block is pruned, also after a kill, and it pays."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int, NMSparsity
from compress.checkpoint.writer import PieceStore
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.evaluate.perplexity import cut_windows, evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import RunResult, run
from compress.recipe import CalibrationOptions, PruneStage, QuantizeStage, Recipe, Stage

SMALL = CalibrationOptions(samples=6, length=48)


def compress(model: Path, out: Path, *stages: Stage, calibration: CalibrationOptions = SMALL) -> RunResult:
    return run(prepare(RunRequest(model, str(model), Recipe(stages, calibration), out, measure=False)), quiet=True)


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_zeros_are_where_the_first_pass_put_them(tiny_model, tmp_path, method) -> None:
    stage = PruneStage(method, sparsity=0.6, layerwise="owl", outlier_factor=2.0, ignore=("down_proj",))
    report = compress(tiny_model("llama"), tmp_path / "out", stage).report
    shares = {each["block"]: each["share"] for each in report["layerwise"]}
    assert len(set(shares.values())) == 3
    assert sum(shares.values()) / 3 == pytest.approx(0.6)
    for block in report["blocks"]:
        zeros = [linear["zeros"] for linear in block["linears"]]
        assert zeros == pytest.approx([shares[block["block"]]] * len(zeros), abs=0.01)
    assert any("first pass" in note for note in report["plan"]["notes"])
    assert any("owl M=2" in (layer["pruning"] or "") for layer in report["plan"]["layers"])


def test_mixed_patterns_are_packed_with_integers(tiny_model, tmp_path) -> None:
    stage = PruneStage("wanda", NMSparsity(4, 8), layerwise="owl", outlier_factor=2.0, spread=0.25)
    report = compress(tiny_model("llama"), tmp_path / "out", stage, QuantizeStage("gptq", Int(4, 64))).report
    patterns = {each["block"]: each["pattern"] for each in report["layerwise"]}
    assert len(set(patterns.values())) > 1
    assert sum(int(pattern.partition(":")[0]) for pattern in patterns.values()) == 4 * len(patterns)
    for module, scheme in PackedCheckpoint.open(tmp_path / "out").schemes.items():
        assert str(scheme.sparsity) == patterns[module.rpartition(".self_attn")[0] or module.rpartition(".mlp")[0]]


@pytest.mark.parametrize("write", [2, 4])
def test_a_run_broken_off_in_its_first_pass_continues_there(tiny_model, tmp_path, monkeypatch, write) -> None:
    stage = PruneStage("wanda", sparsity=0.6, layerwise="owl", outlier_factor=2.0)
    whole = compress(tiny_model("llama"), tmp_path / "whole", stage)
    original, written = PieceStore.write, []

    def failing(store: PieceStore, key: str, *args, **kwargs) -> None:
        written.append(key)
        if len(written) == write:
            raise CheckpointError("the disk is full")
        original(store, key, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(PieceStore, "write", failing)
        with pytest.raises(CheckpointError, match="disk is full"):
            compress(tiny_model("llama"), tmp_path / "broken", stage)
    assert any(key.startswith("survey-hidden") for key in written)
    again = compress(tiny_model("llama"), tmp_path / "broken", stage)
    assert again.report["layerwise"] == whole.report["layerwise"]
    assert [block["digests"] for block in again.report["blocks"]] == [
        block["digests"] for block in whole.report["blocks"]
    ]


@pytest.mark.full
def test_owl_beats_uniform_at_seventy_percent_on_the_trained_model(tmp_path) -> None:
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(demo_model_path()), length=256, max_tokens=2048)
    dense = RuntimeScorer(demo_model_path(), dtype="float32")
    kl = {}
    for layerwise in ("uniform", "owl"):
        stage = PruneStage("wanda", sparsity=0.7, layerwise=layerwise)
        calibration = CalibrationOptions(samples=16, length=256)
        compress(demo_model_path(), tmp_path / layerwise, stage, calibration=calibration)
        kl[layerwise] = evaluate(RuntimeScorer(tmp_path / layerwise, dtype="float32"), windows, dense).kl_mean
    assert kl["owl"] < 0.9 * kl["uniform"]
