"""Streamed evaluation: the figures of the resident one, with one layer in memory, and resumable."""

import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from covering import sample
from folders import change_tensors, private_copy
from runs import compress
from tiny_configs import MIXTURES, VARIANTS
from tiny_models import pack_model, save_tiny_model
from torch import Tensor

from compress.checkpoint.config import read_config
from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.weights import Int
from compress.common.errors import CheckpointError, DataError, NumericsError
from compress.cpu.binding import library
from compress.evaluate import perplexity
from compress.evaluate.scorers import RuntimeScorer
from compress.evaluate.session import EvaluationReport, EvaluationRequest, run_evaluation, run_evaluations
from compress.evaluate.streamed import StreamedScorer, Streaming
from compress.models.registry import FAMILIES
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage
from runtime.core.model_config import parse_config
from runtime.model import streamed as passes
from runtime.model.loader import DecoderLoader
from runtime.model.streamed import StreamedModel

TOKENS = torch.randint(3, 112, (3, 40), generator=torch.Generator().manual_seed(3))
HYBRID, SHARED, CHOOSING = "qwen3_5_text", "gemma4_text", "glm_moe_dsa"
FIRST = [HYBRID, SHARED, CHOOSING]
ORDER = [*FIRST, *sorted(MIXTURES - set(FIRST)), *sorted(set(FAMILIES) - MIXTURES - set(FIRST))]


@pytest.fixture
def streaming(tmp_path: Path) -> Streaming:
    return Streaming(tmp_path / "unfinished")


def streamed_logits(path: Path, folder: Path, **options) -> Tensor:
    forms = {name: options.pop(name) for name in ("kv_cache", "state_dtype") if name in options}
    scorer = StreamedScorer.of(StreamedModel.open(path, **options), folder, perplexity.batches(TOKENS, 112), **forms)
    scorer.compute(lambda *_: None)
    return torch.cat([scorer.logits(batch) for batch in perplexity.batches(TOKENS, 112)])


def resident_logits(path: Path, **options) -> Tensor:
    scorer = RuntimeScorer(path, **options)
    return torch.cat([scorer.logits(batch) for batch in perplexity.batches(TOKENS, 112)])


@pytest.mark.parametrize("family", sample(ORDER, quick=3))
def test_logits_equal_those_of_the_resident_model(family: str, tmp_path: Path) -> None:
    dense, packed = save_tiny_model(tmp_path / "dense", family, **VARIANTS.get(family, {})), tmp_path / "packed"
    linears = {linear.name for linear in parse_config(read_config(dense)).spec.linears()}
    assert pack_model(dense, packed, lambda module: Int(4, 16) if module in linears else None)
    for path in (dense, packed):
        found = streamed_logits(path, tmp_path / f"{path.name}64", dtype="float64")
        assert torch.equal(found, resident_logits(path, dtype="float64"))
        assert torch.equal(streamed_logits(path, tmp_path / path.name), resident_logits(path))


FORMS = [
    ("llama", {"kv_cache": KVCacheScheme.named("int4")}),
    (HYBRID, {"state_dtype": "bfloat16"}),
    (CHOOSING, {"kv_cache": KVCacheScheme.named("int8")}),
]


@pytest.mark.parametrize("case", sample(FORMS))
def test_forms_of_keys_values_and_states(case: tuple[str, dict], tmp_path: Path) -> None:
    family, forms = case
    path = save_tiny_model(tmp_path / "dense", family, **VARIANTS.get(family, {}))
    found = streamed_logits(path, tmp_path / "hidden", dtype="float64", **forms)
    assert torch.equal(found, resident_logits(path, dtype="float64", **forms))
    assert not torch.equal(found, resident_logits(path, dtype="float64"))


def request_for(model: Path, **options) -> EvaluationRequest:
    return EvaluationRequest(model, **{"length": 64, "max_tokens": 512, "dtype": "float64"} | options)


def figures(report: EvaluationReport) -> dict:
    return asdict(report.result) | {"domain": report.domain, "warnings": report.warnings}


@pytest.fixture
def request_of_packed(make_packed) -> EvaluationRequest:
    return request_for(make_packed()[0])


def test_a_streamed_evaluation_gives_the_figures_of_a_resident_one(
    request_of_packed: EvaluationRequest, streaming: Streaming
) -> None:
    steps: list[tuple[str, int, int]] = []
    found = run_evaluation(replace(request_of_packed, streaming=streaming), lambda *step: steps.append(step))
    assert figures(found) == figures(run_evaluation(request_of_packed))
    assert found.result.kl_mean > 0
    # Three layers of each model, seen by the first window and by the others.
    assert [step[1:] for step in steps if "layer" in step[0]] == 2 * [(done, 6) for done in range(1, 7)]
    assert steps[0][0] == "baseline, layer 1 of 3"
    assert not streaming.folder.exists()


@pytest.mark.skipif(library() is None, reason="needs the compiled library")
def test_so_does_one_of_two_forms_of_activations(make_packed, streaming: Streaming) -> None:
    request, forms = request_for(make_packed()[0], dtype="bfloat16", device="cpu"), ("16bit", "8bit")
    found = run_evaluations(replace(request, streaming=streaming), forms)
    assert [figures(each) for each in found] == [figures(each) for each in run_evaluations(request, forms)]
    assert [each.request.activations for each in found] == list(forms)
    assert found[0].result.kl_mean != found[1].result.kl_mean


@pytest.mark.full
def test_so_does_one_with_calibration_text_to_compare(packed_calibrated: Path, streaming: Streaming) -> None:
    request = request_for(packed_calibrated)
    found = run_evaluation(replace(request, streaming=streaming))
    assert found.domain is not None
    assert figures(found) == figures(run_evaluation(request))


@pytest.fixture
def packed_calibrated(tiny_model, tmp_path: Path) -> Path:
    stage, text = QuantizeStage("gptq", Int(4, 32)), CalibrationOptions("bundled", 8, 64)
    compress(tiny_model(), tmp_path / "calibrated", stage, calibration=text)
    return tmp_path / "calibrated"


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch):
    """Interrupts evaluations before a number of steps through layers; later ones are counted only."""
    steps: list[int] = []

    def interrupt(at: int) -> list[int]:
        advance = passes.advance

        def count(decoder, tokens, partial, *forms) -> None:
            steps.append(partial.num_layers)
            if len(steps) == at:
                raise KeyboardInterrupt
            advance(decoder, tokens, partial, *forms)

        monkeypatch.setattr(passes, "advance", count)
        return steps

    return interrupt


@pytest.mark.parametrize("at", sample([9, 1, 4]))
def test_an_interrupted_evaluation_continues(
    at: int, request_of_packed: EvaluationRequest, streaming: Streaming, interrupted_at
) -> None:
    request = replace(request_of_packed, streaming=streaming)
    expected, steps = figures(run_evaluation(request_of_packed)), interrupted_at(at)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(request)
    left = [file for file in streaming.folder.rglob("*") if file.is_file()]
    assert left
    assert not [file for file in left if file.name.endswith(".tmp")]
    assert figures(run_evaluation(request)) == expected
    # Two models of three layers, seen by two parts each; the interrupted step was done again.
    assert len(steps) == 12 + 1
    assert not streaming.folder.exists()


@pytest.mark.full
def test_damaged_hidden_states_are_computed_anew(
    request_of_packed: EvaluationRequest, streaming: Streaming, interrupted_at
) -> None:
    request = replace(request_of_packed, streaming=streaming)
    steps = interrupted_at(4)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(request)
    piece = streaming.folder / "baseline" / "part-00000.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1])
    assert figures(run_evaluation(request)) == figures(run_evaluation(request_of_packed))
    # Its first two layers were computed twice, and the interrupted step.
    assert len(steps) == 12 + 2 + 1


@pytest.mark.full
def test_progress_of_something_else_is_refused_and_thrown_away_on_request(
    request_of_packed: EvaluationRequest, streaming: Streaming, interrupted_at
) -> None:
    interrupted_at(2)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(replace(request_of_packed, streaming=streaming))
    other = replace(request_of_packed, max_tokens=256, streaming=streaming)
    with pytest.raises(CheckpointError, match=r"another configuration: model\.texts") as caught:
        run_evaluation(other)
    assert "--restart" in caught.value.remedy
    again = run_evaluation(replace(other, streaming=replace(streaming, restart=True)))
    assert figures(again) == figures(run_evaluation(replace(other, streaming=None)))


def test_one_layer_is_in_memory_at_a_time(
    request_of_packed: EvaluationRequest, streaming: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref] = []
    most = 0
    load = DecoderLoader.layer

    def counted(self: DecoderLoader, index: int):
        nonlocal most
        layer = load(self, index)
        alive.append(weakref.ref(layer.mlp_norm.weight))
        most = max(most, sum(each() is not None for each in alive))
        return layer

    monkeypatch.setattr(DecoderLoader, "layer", counted)
    run_evaluation(replace(request_of_packed, streaming=streaming))
    assert (len(alive), most) == (6, 1)
    alive.clear()
    run_evaluation(request_of_packed)
    assert most == 6


@pytest.mark.full
def test_numbers_that_are_none_leave_nothing_behind(
    request_of_packed: EvaluationRequest, streaming: Streaming, tmp_path: Path
) -> None:
    broken = private_copy(request_of_packed.model, tmp_path / "broken")
    change_tensors(broken, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(NumericsError, match="the model gave NaN"):
        run_evaluation(replace(request_of_packed, model=broken, streaming=streaming))
    assert not streaming.folder.exists()


def test_what_cannot_be_streamed_is_refused(tiny_model, streaming: Streaming, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="whole models only"):
        run_evaluation(request_for(tiny_model(), backend="transformers", streaming=streaming))
    by_name = save_tiny_model(tmp_path / "by-name", "gpt_neox")
    with pytest.raises(CheckpointError, match=r"'gpt_neox' computes all of its layers at once"):
        StreamedModel.open(by_name)
