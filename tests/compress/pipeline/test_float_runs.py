"""Floats in groups and blocks as targets: asked for by a word, chosen by each method, read by everyone."""

import pytest
import runs
import torch
from runs import compared_with, compress, foreseen_bytes, some_tokens

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import BlockFp8, Int, Mxfp4, Mxfp8, Nvfp4
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import RecipeError, SchemeError
from compress.methods import base
from compress.recipe import CalibrationOptions
from compress.recipe_file import parse_recipe
from compress.search.space import parse_candidates
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model

SHORT = {"calibration": CalibrationOptions(samples=8, length=256), "dtype": "float32"}
FORMS = {"nvfp4": Nvfp4(), "mxfp4": Mxfp4(), "mxfp8": Mxfp8(), "fp8-block": BlockFp8()}
LARGEST_KL = {"nvfp4": 0.2, "mxfp4": 0.4, "mxfp8": 0.02, "fp8-block": 0.02}
"""Far above what is measured, far below what a wrong scale gives."""


@pytest.mark.parametrize("word", ["nvfp4", *(pytest.param(word, marks=pytest.mark.full) for word in list(FORMS)[1:])])
def test_they_go_all_the_way(word: str, tmp_path) -> None:
    scheme = FORMS[word]
    if word == "fp8-block":  # of a model narrower than the usual blocks
        scheme = BlockFp8((64, 48))
    packed = tmp_path / "packed"
    plan = runs.prepared(demo_model_path(), packed, QuantizeStage("rtn", scheme), **SHORT).plan
    assert compress(demo_model_path(), packed, QuantizeStage("rtn", scheme), **SHORT).structure.ok
    checkpoint = PackedCheckpoint.open(packed)
    assert checkpoint.format == "compressed-tensors"
    assert plan.bytes_after == checkpoint.files.nbytes
    assert set(checkpoint.schemes.values()) == {scheme}
    decoder = load_model(packed, device="cpu", dtype="float32")
    assert foreseen_bytes(packed, torch.float32) == decoder.nbytes
    assert compared_with(demo_model_path(), packed, tokens=1024).kl_mean < LARGEST_KL[word]


@pytest.mark.full
@pytest.mark.parametrize("word", list(FORMS))
def test_transformers_computes_the_same_from_a_run(word: str, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    packed, dense = tmp_path / "packed", tmp_path / "dense"
    compress(demo_model_path(), packed, QuantizeStage("rtn", FORMS[word]), **SHORT)
    export_checkpoint(packed, "dense", dense)
    tokens = some_tokens(48)
    with torch.no_grad():
        found, expected = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(tokens).logits for path in (packed, dense)
        )
    assert torch.equal(found, expected)


@pytest.mark.full
def test_gptq_chooses_better_codes(tmp_path) -> None:
    found = {}
    for name in ("rtn", "gptq"):
        compress(demo_model_path(), tmp_path / name, QuantizeStage(name, Mxfp4()), **SHORT)
        found[name] = compared_with(demo_model_path(), tmp_path / name, tokens=2048).kl_mean
    assert found["gptq"] < 0.8 * found["rtn"]


@pytest.mark.parametrize("method", ["gptq", *(pytest.param(name, marks=pytest.mark.full) for name in ("awq", "gptaq"))])
@pytest.mark.parametrize("word", ["nvfp4", pytest.param("fp8-block", marks=pytest.mark.full)])
def test_methods_take_them(method: str, word: str, tiny_model, tmp_path) -> None:
    result = compress(tiny_model(), tmp_path / "packed", QuantizeStage(method, FORMS[word]))
    assert result.structure.ok
    assert set(PackedCheckpoint.open(tmp_path / "packed").schemes.values()) == {FORMS[word]}


def test_pruned_weights_stay_zero(tiny_model, tmp_path) -> None:
    stages = PruneStage("wanda", sparsity=0.5), QuantizeStage("gptq", Nvfp4())
    compress(tiny_model(), tmp_path / "packed", *stages)
    checkpoint = PackedCheckpoint.open(tmp_path / "packed")
    zeros = [(checkpoint.weight(module).dequantize() == 0).float().mean() for module in checkpoint.modules]
    assert min(zeros) >= 0.5


@pytest.mark.parametrize("method", ["hqq", "signround", "smoothquant"])
def test_other_methods_say_that_they_do_not(method: str) -> None:
    with pytest.raises(RecipeError, match=rf"{method} does not support w4a16 nvfp4 g16: .*") as caught:
        QuantizeStage(method, Nvfp4())
    assert "gptq" in caught.value.remedy


@pytest.mark.parametrize("word", list(FORMS))
def test_they_are_asked_for_by_a_word(word: str) -> None:
    stage = QuantizeStage.build({"weights": word})
    assert stage.scheme == FORMS[word]
    assert stage.method == base.default("quantize")
    recipe = parse_recipe(f"stages:\n- quantize: {{weights: {word}, method: gptq}}\n", "here")
    assert recipe.stages == (QuantizeStage("gptq", FORMS[word]),)
    first, _ = parse_candidates(f"{word},w4g128")
    assert (first.scheme, str(first)) == (FORMS[word], word)


def test_words_and_options_that_contradict_each_other() -> None:
    assert QuantizeStage.build({"weights": "int", "bits": 3}).scheme == Int(3)
    assert QuantizeStage.build({"weights": "fp8"}) == QuantizeStage.build({"fp8": True})
    with pytest.raises(RecipeError, match="'nvfp5'") as caught:
        _ = QuantizeStage.build({"weights": "nvfp5"}).scheme
    assert "nvfp4" in caught.value.remedy
    with pytest.raises(RecipeError, match="contradict"):
        _ = QuantizeStage.build({"weights": "nvfp4", "fp8": True}).scheme
    wrong = {"bits": 3, "group_size": 32, "activation_bits": 8, "symmetric": False}
    for word, (key, value) in [(word, item) for word in ("nvfp4", "fp8-block") for item in wrong.items()]:
        with pytest.raises(SchemeError, match=key):
            _ = QuantizeStage.build({"weights": word, key: value}).scheme


def test_the_plan_says_who_reads_them(tiny_model, tmp_path) -> None:
    notes = runs.prepared(tiny_model(), tmp_path / "out", QuantizeStage("rtn", Nvfp4())).plan.notes
    assert [note for note in notes if "w4a16 nvfp4 g16 is read by this runtime, vLLM and transformers" in note]


def test_groups_that_do_not_divide_are_refused_by_the_plan(tiny_model, tmp_path) -> None:
    model = tiny_model(hidden_size=72, head_dim=24, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(SchemeError, match=r"mxfp4 groups of 32 do not divide 72"):
        runs.prepared(model, tmp_path / "out", QuantizeStage("rtn", Mxfp4()))
