"""From names and paths to logits and figures: which baseline, which warnings, which refusals."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folders import change_config, change_tensors, private_copy
from runs import compress, with_outliers
from transformers import AutoModelForCausalLM

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.weights import Int, Scheme
from compress.common.cli import BUNDLED, bundled_path, demo_model_path
from compress.common.errors import CheckpointError, DataError
from compress.cpu.binding import library
from compress.evaluate.perplexity import cut_windows, evaluate
from compress.evaluate.scorers import TransformersScorer, load_dequantized, open_scorer
from compress.evaluate.session import EvaluationRequest, quick_check, recorded_source, run_evaluation
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage
from runtime.backends.registry import is_fast

BOTH = ("runtime", "transformers")


def request_for(model: Path, **options) -> EvaluationRequest:
    return EvaluationRequest(model, **{"length": 64, "max_tokens": 256, "backend": "transformers"} | options)


@pytest.mark.parametrize("backend", BOTH)
def test_a_packed_checkpoint_is_compared_with_its_recorded_source(make_packed, tiny_model, backend: str):
    source = tiny_model(dtype=torch.float32)
    report = run_evaluation(request_for(make_packed()[0], backend=backend))
    assert report.baseline == source
    assert report.result.kl_mean > 0
    assert report.warnings == ()
    alone = run_evaluation(request_for(source, backend=backend))
    assert alone.baseline is None
    assert alone.result.perplexity == pytest.approx(report.result.baseline_perplexity)


def test_a_named_baseline_wins_over_the_recorded_one(make_packed):
    packed, dequantized = make_packed()
    report = run_evaluation(request_for(packed, baseline=dequantized))
    assert report.baseline == dequantized
    assert report.result.kl_mean == pytest.approx(0, abs=1e-7)


def test_a_source_that_has_gone_is_a_warning(make_recorded, tmp_path: Path):
    report = run_evaluation(request_for(make_recorded(source=str(tmp_path / "gone"))))
    assert report.result.kl_mean is None
    assert "gone is not there any more" in report.warnings[0]


def test_demo_means_the_bundled_model():
    for name in BUNDLED:
        assert recorded_source({"compression_config": {"source": name}}) == bundled_path(name)
    assert recorded_source({"compression_config": {"source": "/models/a"}}) == Path("/models/a")
    assert recorded_source({}) is None


def test_the_report_is_plain_json_with_what_a_repetition_needs(make_packed):
    values = json.loads(json.dumps(run_evaluation(request_for(make_packed()[0])).to_dict(), allow_nan=False))
    assert {"perplexity", "baseline_perplexity", "kl_mean", "kl_p999", "tokens"} <= values.keys()
    assert values["tokens"] == 4 * 63
    assert values["data"] == "pydoc"
    assert values["data_sha256"] == load_texts("pydoc").sha256


def test_windows_never_exceed_the_context(tiny_model):
    report = run_evaluation(request_for(tiny_model(), length=100_000, max_tokens=600))
    assert report.windows.tokens.shape == (2, 256)


def test_quick_check_measures_a_fixed_slice(make_packed):
    packed, dequantized = make_packed()
    values = quick_check(packed, dequantized, tokens=512)
    assert values["tokens"] == 2 * 255
    assert values["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert values == quick_check(packed, dequantized, tokens=512)


@pytest.mark.skipif(library() is None or not is_fast(torch.bfloat16), reason="activations are not rounded here")
@pytest.mark.parametrize(("channels", "form"), [([], "8bit"), ([5, 77, 130, 201], "16bit")])
def test_quick_check_reports_the_form_of_activations_that_the_gate_allows(
    channels: list[int], form: str, tmp_path: Path
) -> None:
    """Outliers here and there raise the scales of all groups of columns, so that others are rounded to nothing."""
    source = with_outliers(demo_model_path(), tmp_path / "dense", channels, 128.0)
    compress(source, tmp_path / "packed", QuantizeStage("rtn", Int(4, 128)))
    values = quick_check(tmp_path / "packed", source, tokens=1024)
    measured = values["activations_measured"]
    assert values["activations"] == form
    assert values["kl_mean"] == measured[f"kl_{form}"]
    assert (measured["kl_8bit"] <= 1.1 * measured["kl_16bit"]) == (form == "8bit")
    for name in ("16bit", "8bit"):
        request = request_for(tmp_path / "packed", baseline=source, backend="runtime", length=512, activations=name)
        assert run_evaluation(replace(request, max_tokens=1024)).result.kl_mean == measured[f"kl_{name}"]


def test_quick_check_is_not_begun_without_the_memory_for_both_models(make_packed, monkeypatch: pytest.MonkeyPatch):
    packed, dequantized = make_packed()
    monkeypatch.setattr("compress.common.device.available_bytes", lambda device: 1 << 20)
    with pytest.raises(CheckpointError, match=r"\d MiB.*1\.0 MiB"):
        quick_check(packed, dequantized)


def calibrated_on(source: str, **options) -> dict:
    block = {"source": source, "sha256": load_texts(source).sha256, "samples": 8, "length": 64, "seed": 0}
    return {"calibration": block | options}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "manual.txt"
    path.write_text("\n\n".join(load_texts("pydoc").documents[:3]))
    return path


def test_calibration_on_the_same_text_is_a_warning(make_recorded):
    packed = make_recorded(**calibrated_on("pydoc"))
    assert "also the calibration text" in run_evaluation(request_for(packed)).warnings[0]


@pytest.mark.full
def test_what_the_pipeline_records_is_what_the_check_reads(tiny_model, text: Path, tmp_path: Path):
    source, calibration = tiny_model(), CalibrationOptions(str(text), 8, 64)
    compress(source, tmp_path / "out", QuantizeStage("gptq", Int(4, 32)), calibration=calibration, seed=5)
    report = run_evaluation(request_for(tmp_path / "out", max_tokens=2048))
    assert report.baseline == source
    (warning,) = report.warnings
    assert re.search(rf"\d ?% of pydoc .*{text}", warning)
    (warning,) = run_evaluation(request_for(tmp_path / "out", data=str(text))).warnings
    assert "is also the calibration text" in warning


@pytest.mark.full
def test_other_text_and_vanished_text_are_no_warning(make_recorded, text: Path):
    packed = make_recorded(**calibrated_on("bundled"))
    assert run_evaluation(request_for(packed)).warnings == ()
    change_config(packed, compression_config={"format_version": 1, **calibrated_on(str(text))})
    text.unlink()
    assert run_evaluation(request_for(packed)).warnings == ()


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        ({"backend": "vllm"}, "'vllm'", "--backend"),
        ({"dtype": "int3"}, "'int3'", "bfloat16"),
        ({"data": "./nowhere.txt"}, r" \./nowhere\.txt ", "pydoc"),
        ({"length": 1}, " 1 ", "--max-seq-length 2"),
        ({"backend": "transformers", "kernels": "reference"}, "reference", "--backend runtime"),
        ({"backend": "transformers", "activations": "8bit"}, "activations", "--backend runtime"),
        ({"activations": "4bit"}, "'4bit'", "--activations"),
    ],
)
def test_unusable_options_are_refused(tiny_model, options: dict, problem: str, remedy: str):
    with pytest.raises(DataError, match=problem) as caught:
        run_evaluation(request_for(tiny_model(), **options))
    assert re.search(remedy, caught.value.remedy)


def test_a_folder_without_model_or_tokenizer_is_refused(tiny_model, tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere"):
        run_evaluation(request_for(tmp_path / "nowhere"))
    path = private_copy(tiny_model(), tmp_path / "model")
    for file in path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match=str(path)):
        run_evaluation(request_for(path))


TOKENS = torch.arange(2, 66).view(2, 32)


def test_demo_perplexity_equals_the_loss_of_transformers():
    path = demo_model_path()
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(path), length=128, max_tokens=1024)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        losses = [model(row[None], labels=row[None]).loss.item() for row in windows.tokens]
    by_hand = math.exp(sum(losses) / len(losses))
    for backend in ("transformers", "runtime"):
        measured = evaluate(open_scorer(path, backend, dtype="float32"), windows)
        assert measured.perplexity == pytest.approx(by_hand, rel=1e-5)
        assert measured.tokens == 8 * 127


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {}])
def test_dense_weights_give_the_logits_of_transformers(tiny_model, options: dict):
    path = tiny_model(dtype=torch.float32, **options)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS).logits
    assert torch.equal(TransformersScorer(path).logits(TOKENS), expected)


def test_dtype_follows_the_config_unless_named(tiny_model):
    path = tiny_model(dtype=torch.float32)
    assert load_dequantized(path).dtype == torch.float32
    assert load_dequantized(path, dtype="float64").dtype == torch.float64
    assert TransformersScorer(path, dtype="float64").logits(TOKENS).dtype == torch.float64
    assert load_dequantized(demo_model_path()).dtype == torch.bfloat16
    assert TransformersScorer(demo_model_path()).logits(TOKENS).dtype == torch.float32


def test_missing_and_misshapen_weights_are_named(tiny_model, tmp_path: Path):
    path, name = private_copy(tiny_model(dtype=torch.float32), tmp_path / "model"), "model.norm.weight"
    change_tensors(path, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    with pytest.raises(CheckpointError, match=r"config\.json.*model\.norm\.weight"):
        load_dequantized(path)
    change_tensors(path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"1 weights.*model\.norm\.weight"):
        load_dequantized(path)


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_packed_weights_give_the_logits_of_their_dequantized_twin(make_packed, options: dict):
    packed, dequantized = make_packed(**options)
    expected = AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32)(TOKENS).logits
    assert torch.equal(TransformersScorer(packed).logits(TOKENS), expected)


@pytest.mark.parametrize("scheme", [Int(4, 32), Int(4, 64, symmetric=False), Int(8, None), Int(3, 32)])
def test_both_backends_agree_on_packed_checkpoints(make_packed, scheme: Scheme):
    packed, _ = make_packed(scheme, attention_bias=True)
    assert_backends_agree(packed, load_tokenizer(packed))


def test_both_backends_agree_on_a_dense_checkpoint(tiny_model):
    path = tiny_model(dtype=torch.float32, tie_word_embeddings=True)
    assert_backends_agree(path, load_tokenizer(path))


def assert_backends_agree(path: Path, tokenizer) -> None:
    windows = cut_windows(load_texts("pydoc"), tokenizer, length=64, max_tokens=256)
    runtime, cross_check = (open_scorer(path, backend, dtype="float32") for backend in ("runtime", "transformers"))
    result = evaluate(runtime, windows, cross_check)
    assert result.perplexity == pytest.approx(result.baseline_perplexity, rel=1e-4)
    assert abs(result.kl_mean) < 1e-6
