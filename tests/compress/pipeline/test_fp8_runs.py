"""8-bit floats from a checkpoint to a served one: chosen in one word, smoothed where asked, read by everyone."""

from __future__ import annotations

import pytest
import torch

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import MAX_FP8
from compress.checkpoint.weights import Activations, Fp8
from compress.common.cli import demo_model_path
from compress.common.errors import RecipeError, SchemeError
from compress.evaluate.perplexity import cut_windows, evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.methods.smoothquant import SmoothQuantOptions
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import RunResult, run
from compress.recipe import CalibrationOptions, QuantizeStage, Recipe
from compress.recipe_file import parse_recipe
from compress.stage_keys import QuantizeKeys
from runtime.backends.base import Target
from runtime.core.model_config import parse_config
from runtime.memory.estimate import Weights
from runtime.model.loader import load_model

W8A16, W8A8 = Fp8(), Fp8(Activations.FP8)
SMALL = CalibrationOptions(samples=8, length=256)


def request(out, *stages: QuantizeStage) -> RunRequest:
    model = demo_model_path()
    return RunRequest(model, str(model), Recipe(stages, SMALL), out, dtype="float32", measure=False)


def compress(out, *stages: QuantizeStage) -> RunResult:
    return run(prepare(request(out, *stages)), quiet=True)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    out = tmp_path_factory.mktemp("fp8") / "packed"
    result = compress(out, QuantizeStage("rtn", W8A8))
    assert result.structure.ok
    return out


def test_the_plan_is_what_is_written(packed):
    plan = prepare(request(packed.parent / "other", QuantizeStage("rtn", W8A8))).plan
    checkpoint = PackedCheckpoint.open(packed)
    assert plan.bytes_after == checkpoint.files.nbytes
    assert set(checkpoint.schemes.values()) == {W8A8}


def test_what_is_served_was_planned_and_is_close_to_the_model(packed):
    decoder = load_model(packed, device="cpu", dtype="float32")
    lines = [line for line in decoder.description if "fp8" in line]
    assert [line.split(":")[0] for line in lines] == [
        f"6 x {name}" for name in ("q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj")
    ]
    assert all("kernel dequantized" in line and "triton_fp8 runs on NVIDIA GPUs" in line for line in lines)
    checkpoint = PackedCheckpoint.open(packed)
    target = Target(torch.device("cpu"), torch.float32)
    planned = Weights(checkpoint, parse_config(checkpoint.config), target, "auto", 2**40)
    assert planned.prepared() == decoder.nbytes
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(packed), length=256, max_tokens=1024)
    dense = RuntimeScorer(demo_model_path(), dtype="float32")
    assert evaluate(RuntimeScorer(packed, dtype="float32"), windows, dense).kl_mean < 0.03


def test_transformers_computes_the_same(packed):
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(10, 4000, (1, 48), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(tokens).logits.log_softmax(-1)
    ours = RuntimeScorer(packed, dtype="float32").logits(tokens).log_softmax(-1)
    dense = RuntimeScorer(demo_model_path(), dtype="float32").logits(tokens).log_softmax(-1)
    kl = [torch.nn.functional.kl_div(each, expected, log_target=True, reduction="none").sum(-1).mean()
          for each in (ours, dense)]  # fmt: skip
    assert kl[0] < 0.05 * kl[1]


def test_smoothing_works_with_it(tiny_model, tmp_path):
    recipe = Recipe((QuantizeStage("smoothquant", W8A8),), CalibrationOptions(samples=4, length=64))
    request = RunRequest(tiny_model(), "tiny", recipe, tmp_path / "packed", measure=False)
    result = run(prepare(request), quiet=True)
    smoothing = [edge for block in result.report["blocks"] for edge in block["smoothing"]]
    assert smoothing
    assert all(edge["loss_after"] <= edge["loss_before"] for edge in smoothing)
    assert set(PackedCheckpoint.open(tmp_path / "packed").schemes.values()) == {W8A8}


def test_scales_have_the_least_error_and_clip_nothing():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 96, generator=generator)
    weight[3] = 0
    importance = torch.rand(96, generator=generator)
    found = W8A16.round(weight, importance)
    assert (weight.abs().amax(1) / found.scale[:, 0].float() < MAX_FP8 * 1.01).all()
    errors = [
        ((each - weight).square() * importance).sum(1) for each in (found.dequantize(), W8A16.round_in_range(weight))
    ]
    assert (errors[0] <= errors[1]).all()
    assert errors[0].sum() < errors[1].sum()
    assert torch.equal(found.dequantize()[3], torch.zeros(96))
    for dtype in (torch.bfloat16, torch.float16):
        tiny = W8A16.round(weight * 1e-9, scale_dtype=dtype)
        assert torch.isfinite(tiny.dequantize()).all()


def test_words_for_it():
    recipe = parse_recipe("stages:\n- quantize: {fp8: true}\n", "r.yaml")
    assert recipe.stages == (QuantizeStage("rtn", W8A8),)
    text = "stages:\n- quantize: {method: smoothquant, fp8: true, alpha: 0.5}\n"
    assert parse_recipe(text, "r.yaml").stages == (QuantizeStage("smoothquant", W8A8, options=SmoothQuantOptions(0.5)),)
    text = "stages:\n- quantize: {fp8: true, activation_bits: 16}\n"
    assert parse_recipe(text, "r.yaml").stages == (QuantizeStage("rtn", W8A16),)
    assert QuantizeKeys(fp8=True).scheme == W8A8
    assert QuantizeKeys(fp8=True, activation_bits=16).scheme == W8A16


@pytest.mark.parametrize("method", ["awq", "gptq", "gptaq", "signround", "hqq"])
def test_methods_that_choose_integers_are_refused(method):
    with pytest.raises(RecipeError, match=f"{method} cannot make.*chooses integers.*rtn or smoothquant"):
        QuantizeStage(method, W8A8)


def test_other_refusals(tmp_path):
    with pytest.raises(SchemeError, match="8 bits"):
        QuantizeKeys(bits=4, fp8=True).stage()
    with pytest.raises(RecipeError, match="8-bit"):
        prepare(request(tmp_path / "a", QuantizeStage("rtn", W8A16, targets=("embed_tokens",))))
    with pytest.raises(SchemeError, match="outlier columns"):
        prepare(request(tmp_path / "b", QuantizeStage("rtn", W8A8, outlier_columns=4)))
