"""The plan: what every tensor becomes, what is noted, and what is refused before anything runs."""

import json
import re
from pathlib import Path

import pytest
import runs
import torch
from folders import change_config, change_tensors, private_copy

from compress.checkpoint.config import read_config
from compress.checkpoint.meta_model import check_decoder
from compress.checkpoint.scheme import FLOAT_BITS
from compress.checkpoint.weights import Int, LowRank, NMSparsity, Scheme
from compress.common.errors import CheckpointError, DataError, RecipeError, SchemeError, ToolkitError
from compress.methods import base
from compress.pipeline.prepare import RunContext
from compress.plan import LayerPlan, Plan, PlanRow
from compress.recipe import CalibrationOptions
from compress.stages.base import Stage
from compress.stages.factorize import LAUNCH_SECONDS, READ_RATE, factor_notes, slower_seconds
from compress.stages.kv_cache import KVCacheStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

SMALL = CalibrationOptions(samples=2, length=32)


def prepared(path: Path, *stages: Stage, **options) -> RunContext:
    return runs.prepared(path, Path("unwritten"), *stages, **{"calibration": SMALL} | options)


def plan_for(path: Path, *stages: Stage) -> Plan:
    return prepared(path, *stages).plan


def test_every_tensor_has_a_row_and_a_fate(tiny_model) -> None:
    plan = plan_for(tiny_model("llama_biased"), QuantizeStage("awq", Int(4, 64), ignore=("down_proj",)))
    fates = {row.kind: (str(row.layer_plan.scheme) if row.layer_plan else row.reason) for row in plan.rows}
    assert fates["model.layers.*.self_attn.q_proj.weight"] == "w4a16 g64 sym"
    assert fates["model.layers.*.self_attn.q_proj.bias"] == "norm, bias or other vector"
    assert fates["model.layers.*.mlp.down_proj.weight"] == "left out by --ignore down_proj"
    assert fates["model.embed_tokens.weight"] == "token embedding"
    assert fates["lm_head.weight"] == "output head"
    assert len(plan.packed) == 3 * 6
    assert json.loads(json.dumps(plan.to_dict()))["bytes_after"] == plan.bytes_after < plan.bytes_before


def test_bits_per_weight_count_codes_scales_and_zero_points(tiny_model) -> None:
    path = tiny_model()
    assert plan_for(path, QuantizeStage("rtn", Int(4, 128))).bits_per_weight == 4 + 16 / 128
    assert plan_for(path, QuantizeStage("rtn", Int(3, 32, False))).bits_per_weight == 3 + (16 + 3) / 32


def test_layers_that_get_no_smaller_are_noted(tiny_model) -> None:
    stage = QuantizeStage("rtn", Int(8, 32), outlier_columns=0.99, targets=("*.down_proj",))
    (note,) = [note for note in plan_for(tiny_model(), stage).notes if "no smaller" in note]
    assert note.startswith("3 tensors would get no smaller (e.g. model.layers.")
    assert "down_proj.weight" in note
    assert not any("no smaller" in note for note in plan_for(tiny_model(), QuantizeStage("rtn", Int(4, 128))).notes)


def test_pruning_what_a_rotation_spreads_is_noted(tiny_model) -> None:
    pruning = PruneStage("wanda", NMSparsity(2, 4))
    assert any("a rotation spreads" in note for note in plan_for(tiny_model(), RotateStage(), pruning).notes)
    assert not any("a rotation spreads" in note for note in plan_for(tiny_model(), pruning).notes)


def test_later_stages_win(tiny_model) -> None:
    plan = plan_for(
        tiny_model(), QuantizeStage("rtn", Int(4, 128)), QuantizeStage("rtn", Int(8, None), targets=("*.down_proj",))
    )
    schemes = {row.kind.split(".")[-2]: row.layer_plan.scheme for row in plan.packed}
    assert schemes["down_proj"] == Int(8, None)
    assert schemes["up_proj"] == Int(4, 128)


def test_group_size_that_does_not_divide_names_every_layer_and_what_fits(tiny_model) -> None:
    path = tiny_model(intermediate_size=192)
    with pytest.raises(SchemeError) as caught:
        plan_for(path, QuantizeStage("rtn", Int(4, 128)))
    assert "model.layers.*.mlp.down_proj (3 layers, 192 inputs)" in str(caught.value)
    assert "q_proj" not in str(caught.value)
    assert "--group-size 64" in caught.value.remedy
    assert "--ignore down_proj" in caught.value.remedy


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda weight: weight.to(torch.int8), " int8"), (lambda weight: weight[:, :32], r"\[128, 32\] .*\[128, 256\]")],
)
def test_tensors_that_are_not_the_model_s_are_refused_before_anything_runs(tiny_model, tmp_path, change, words) -> None:
    path, name = private_copy(tiny_model(), tmp_path / "changed"), "model.layers.1.mlp.down_proj.weight"
    change_tensors(path, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(CheckpointError, match=rf"{name} .*{words}"):
        plan_for(path, QuantizeStage("rtn", Int(8, None)))


def test_ignoring_everything_is_an_error(tiny_model) -> None:
    with pytest.raises(RecipeError, match="--ignore"):
        plan_for(tiny_model(), QuantizeStage("rtn", ignore=("model.layers",)))


def test_smoothing_edges_need_all_their_targets(tiny_model) -> None:
    plan = plan_for(tiny_model(), QuantizeStage("awq", Int(4, 64), ignore=("up_proj",)))
    assert {edge.smooth_layer for edge in plan.smoothing_mappings[0]} == {"input_layernorm", "self_attn.v_proj"}
    assert any(
        "post_attention_layernorm -> mlp.gate_proj, mlp.up_proj is not smoothed in 3 of 3 blocks" in note
        for note in plan.notes
    )
    assert any("mlp.gate_proj, mlp.up_proj differ in scheme" in note for note in plan.notes)


def test_unknown_family_is_quantized_without_smoothing_and_says_so(tiny_model) -> None:
    plan = plan_for(tiny_model("phi3"), QuantizeStage("awq", Int(4, 64)))
    assert plan.smoothing_mappings == ((), (), ())
    assert {row.kind.split(".")[-2] for row in plan.packed} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert any("'phi3' has no known smoothing mappings" in note for note in plan.notes)


def test_the_copy_of_a_tied_head_is_not_stored_again(tiny_model, tmp_path) -> None:
    path = private_copy(tiny_model(tie_word_embeddings=True), tmp_path / "model")
    change_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    row = next(row for row in plan_for(path, QuantizeStage("rtn")).rows if row.tensor == "lm_head.weight")
    assert row.bytes_after == 0
    assert "tied" in row.reason


def test_scales_take_the_models_dtype(tiny_model) -> None:
    assert plan_for(tiny_model(dtype=torch.float16), QuantizeStage("rtn")).scale_dtype == "float16"
    assert plan_for(tiny_model(dtype=torch.float32), QuantizeStage("rtn")).scale_dtype == "float32"


def test_calibration_is_cut_to_the_models_context(tiny_model) -> None:
    long = CalibrationOptions(samples=2, length=10_000)
    context = prepared(tiny_model(), QuantizeStage("awq"), calibration=long)
    assert context.sequences.tokens.shape == (2, 256)
    assert any("--max-seq-length 10000" in note for note in context.notes)


@pytest.mark.parametrize(("samples", "length"), [(10**9, 2), (2, 10**9), (0, 512), (-1, 512), (64, 1), (64, -1)])
def test_impossible_amounts_of_calibration_are_refused(samples: int, length: int) -> None:
    with pytest.raises(RecipeError) as caught:
        CalibrationOptions(samples=samples, length=length)
    assert re.search("--num-calibration-samples|--max-seq-length", caught.value.remedy)


def test_a_folder_without_tokenizer_is_planned_and_says_so(tiny_model, tmp_path) -> None:
    path = private_copy(tiny_model(), tmp_path / "model")
    for file in path.glob("tokenizer*"):
        file.unlink()
    context = prepared(path, QuantizeStage("rtn"))
    assert not context.has_tokenizer
    assert any("tokenizer" in note for note in context.plan.notes)
    with pytest.raises(DataError):
        prepared(path, QuantizeStage("rtn"), KVCacheStage())
    assert prepared(tiny_model(), QuantizeStage("rtn")).has_tokenizer


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"vision_config": {}}, r".config.json.*vision_config"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"model_type": ""}, "model_type"),
    ],
)
def test_models_of_another_kind_are_refused(tiny_model, change: dict, problem: str) -> None:
    path = tiny_model()
    with pytest.raises(CheckpointError, match=problem):
        check_decoder(path, read_config(path) | change)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "llamma"}, "'llamma'.*pip install -U transformers"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"num_hidden_layers": 5}, r"^18 .*model\.layers\.3"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "--trust-remote-code"),
    ],
)
def test_models_that_cannot_be_built_are_refused(tiny_model, tmp_path, change: dict, problem: str) -> None:
    path = change_config(private_copy(tiny_model(), tmp_path / "model"), **change)
    with pytest.raises(CheckpointError, match=problem):
        plan_for(path, QuantizeStage("rtn"))


@pytest.mark.parametrize(("option", "value"), [("devices", "tpu"), ("devices", "meta"), ("dtype", "int8")])
def test_impossible_devices_and_dtypes_are_refused(tiny_model, option: str, value: str) -> None:
    with pytest.raises(ToolkitError, match=value):
        prepared(tiny_model(), QuantizeStage("rtn"), **{option: value})


def test_nothing_is_written_by_planning(tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan_for(tiny_model(), QuantizeStage("awq"))
    assert list(tmp_path.iterdir()) == []


def row(outputs: int, inputs: int, scheme: Scheme | None) -> PlanRow:
    before = 2 * outputs * inputs
    after = before if scheme is None else scheme.stored_bits(outputs, inputs) // 8
    assignment = LayerPlan(base.QUANTIZATION.find("rtn"), scheme) if scheme else None
    return PlanRow(f"layer.{outputs}x{inputs}.weight", (outputs, inputs), assignment, "", before, after)


def test_a_second_product_pays_when_it_saves_more_than_its_launch() -> None:
    break_even = round(READ_RATE * LAUNCH_SECONDS)
    assert slower_seconds(10 * break_even, 9 * break_even) == pytest.approx(0, abs=1e-9)
    assert slower_seconds(10 * break_even, 8 * break_even) == pytest.approx(-LAUNCH_SECONDS, rel=1e-3)
    assert slower_seconds(0, 0) == LAUNCH_SECONDS


@pytest.mark.parametrize(
    ("shape", "bits", "rank", "is_slower"),
    [
        ((4096, 4096), FLOAT_BITS, 1664, True),  # 27 of 34 MB: six microseconds against seven, and a launch
        ((14336, 4096), FLOAT_BITS, 1600, False),  # half of 117 MB
        ((4096, 4096), 4, 1024, True),  # never for a layer that is read in two microseconds
        ((14336, 4096), 4, 2560, True),  # saves six of 30 MB
        ((28672, 8192), 4, 2048, False),
    ],
)
def test_small_layers_and_small_savings_are_named(shape, bits: int, rank: int, is_slower: bool) -> None:
    scheme = LowRank(None if bits == FLOAT_BITS else Int(bits), rank)
    notes = factor_notes([row(*shape, scheme), row(64, 64, Int(4, 32)), row(64, 64, None)])
    assert bool(notes) is is_slower
    if notes:
        assert notes[0].startswith("1 of 1 factorized layers")
        assert f"layer.{shape[0]}x{shape[1]}" in notes[0]


def test_without_factors_nothing_is_said() -> None:
    assert factor_notes([row(64, 64, Int(4, 32)), row(64, 64, None)]) == []
