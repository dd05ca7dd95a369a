"""Calibration text in whole runs: mixtures, text from the model itself, plans, and what the checkpoint says of it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from runs import compared_with, compress

from calibration.sources import load_texts
from compress.checkpoint.config import compression_block, read_config
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, DataError
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.pipeline.prepare import RunRequest, SourceModel, calibration_sequences, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.quantize import QuantizeStage


def request(model: Path, out: Path, source: str, seed: int = 0, size: tuple[int, int] = (4, 32)) -> RunRequest:
    recipe = Recipe((QuantizeStage("gptq", Int(4, 32)),), CalibrationOptions(source, *size), seed)
    return RunRequest(model, str(model), recipe, out, measure=False, dtype="float32")


def test_a_plan_does_not_load_the_model_and_claims_no_hash(tiny_model, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("compress.pipeline.prepare._load", None)
    planned = prepare(request(tiny_model(), tmp_path / "out", "self"), dry_run=True)
    calibration = planned.to_dict()["calibration"]
    assert (calibration["source"], calibration["sha256"], calibration["token_sha256"]) == ("self", None, None)
    assert calibration["tokens"] == 4 * 32


def test_the_model_writes_its_calibration_text(tiny_model, tmp_path: Path, capsys):
    first, again, other = (prepare(request(tiny_model(), tmp_path / "out", "self", seed)) for seed in (0, 0, 1))
    assert first.sequences.token_sha256 == again.sequences.token_sha256
    assert first.sequences.token_sha256 != other.sequences.token_sha256
    assert re.search(r" 4 .* 32 tokens", capsys.readouterr().err)
    run(first, quiet=True)
    calibration = compression_block(read_config(tmp_path / "out"))["calibration"]
    assert calibration["source"] == "self"
    assert calibration["token_sha256"] == first.sequences.token_sha256


def test_the_model_continues_the_other_texts_of_a_mixture(tiny_model, tmp_path: Path, manual: Path):
    source = f"{manual}:0.25,self:0.75"
    first, again = (prepare(request(tiny_model(), tmp_path / "out", source, size=(16, 64))).sequences for _ in range(2))
    assert first.token_sha256 == again.token_sha256
    assert [part.sequences for part in first.parts] == [4, 12]
    text = prepare(request(tiny_model(), tmp_path / "out", str(manual), size=(4, 64))).sequences.tokens
    pieces = {tuple(piece.tolist()) for piece in text.unfold(1, 8, 1).flatten(0, 1)}
    continued = [row for row in first.tokens if not (row == text).all(1).any()]
    assert len(continued) == 12
    assert all(tuple(row[1:9].tolist()) in pieces for row in continued)


@pytest.mark.full
def test_short_text_that_the_model_continues_calibrates_better(tmp_path: Path):
    """2 bits on the trained demo model, after 1,024 tokens of text."""
    found = {}
    for source, samples in {"bundled": 4, "bundled:4,self:28": 32}.items():
        out, options = tmp_path / str(samples), CalibrationOptions(source, samples, 256)
        compress(demo_model_path(), out, QuantizeStage("gptq", Int(2, 64)), calibration=options, dtype="float32")
        found[source] = compared_with(demo_model_path(), out, 4096, 512).kl_mean
    assert found["bundled:4,self:28"] < 0.7 * found["bundled"]


def test_a_text_with_tokens_of_another_model_is_refused_before_it_is_continued(tiny_model, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("compress.pipeline.prepare._load", None)
    model = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 100}))
    source = SourceModel(model, torch.device("cpu"), torch.float32)
    with pytest.raises(DataError, match=r"\b100 tokens\b"):
        calibration_sequences(CalibrationOptions("bundled,self", 4, 32), source, 0)


def test_the_model_is_not_loaded_without_the_memory_for_it(tiny_model, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("compress.common.device.available_bytes", lambda device: 1 << 20)
    with pytest.raises(CheckpointError, match=r"1\.0 MiB") as caught:
        prepare(request(tiny_model(), tmp_path / "out", "self"))
    assert " self" in caught.value.remedy


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    path = tmp_path / "manual.txt"
    path.write_text("\n\n".join(load_texts("pydoc").documents[:3]))
    return path


def evaluation(model: Path, **options) -> EvaluationRequest:
    return EvaluationRequest(model, length=64, max_tokens=2048, backend="transformers", **options)


@pytest.mark.full
def test_a_mixture_is_recorded_and_compared_with_the_evaluation_text(tiny_model, tmp_path: Path, manual: Path):
    out = tmp_path / "out"
    run(prepare(request(tiny_model(), out, f"self:0.25,{manual}:0.75", size=(16, 64))), quiet=True)
    calibration = compression_block(read_config(out))["calibration"]
    assert [(part["source"], part["sequences"]) for part in calibration["parts"]] == [("self", 4), (str(manual), 12)]
    assert calibration["parts"][1]["sha256"] == load_texts(str(manual)).sha256
    report = run_evaluation(evaluation(out))
    assert report.overlap > 0.01
    (warning,) = report.warnings
    assert re.search(rf"\d ?% of pydoc .*self:0\.25,{manual}:0\.75", warning)
    (same,) = run_evaluation(evaluation(out, data=str(manual))).warnings
    assert "is also the calibration text" in same
    manual.write_text("something else " * 1000)
    changed = run_evaluation(evaluation(out))
    assert (changed.overlap, changed.warnings) == (None, ())
    assert changed.to_dict()["calibration_overlap"] is None


@pytest.mark.full
def test_text_off_the_domain_is_said_after_the_run(tmp_path: Path):
    """Digits and letters without sense against the Python manual, on the trained demo model. By the token they are even
    easier to predict; by the byte they are not."""
    gibberish = tmp_path / "gibberish.txt"
    gibberish.write_text(" ".join(f"{number * 7919 % 100003:x}q{number * 104729 % 997}" for number in range(3000)))
    recipe = Recipe(
        (QuantizeStage("rtn", Int(8, None)), QuantizeStage("gptq", Int(8, None), targets=("*.0.*.q_proj",)))
    )
    outcomes = {}
    for name, source in {"off": str(gibberish), "on": "bundled"}.items():
        options = CalibrationOptions(source, 8, 128)
        whole = Recipe(recipe.stages, options)
        made = run(prepare(RunRequest(demo_model_path(), "demo", whole, tmp_path / name)), quiet=True)
        outcomes[name] = made.quality
    assert any("is off the model's domain" in warning for warning in outcomes["off"]["warnings"])
    assert outcomes["on"]["warnings"] == []
    assert outcomes["off"]["bits_per_byte"]["calibration"] > 1.5 * outcomes["on"]["bits_per_byte"]["calibration"]
    assert outcomes["on"]["calibration_overlap"] == 0


def test_no_chat_template_is_refused_before_anything_runs(tiny_model, tmp_path: Path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(DataError, match=r"chats .*chat template"):
        prepare(request(tiny_model(), tmp_path / "out", str(chats)))
    assert not (tmp_path / "out.partial").exists()
