"""Quantized checkpoints as sources: dequantized block by block, or copied with their codes where nothing changes."""

import shutil
from pathlib import Path

import pytest
import runs
import torch
from folders import change_config, change_tensors, private_copy
from killed_runs import killed_after_block
from safetensors.torch import load_file
from tiny_configs import VARIANTS
from tiny_models import load_reference, pack_model, put_checkpoint, reference_logits, save_tiny_model

from compress.checkpoint.config import compression_block, quantization_block, read_config
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Activations, BlockFp8, Fp8, Int, Mxfp4
from compress.checkpoint.weights.base import digest
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.pipeline.prepare import RunRequest
from compress.recipe import CalibrationOptions
from compress.search.run import Files, carry_out, find
from compress.search.space import Goal, SearchRequest, parse_candidates
from compress.search.survey import survey
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage
from runtime.model.loader import load_model
from runtime.model.scoring import score

RTN = QuantizeStage("rtn", Int(4, 32))
ATTENTION = QuantizeStage("gptq", Int(4, 32), ignore=("*.mlp.*",))
BF16, F16 = torch.bfloat16, torch.float16
TOKENS = torch.arange(48).view(2, 24) * 7 % 112
FORMS = {
    "fp8 blocks": ("fp8", BlockFp8((32, 32)), BF16),
    "fp8 dynamic": ("compressed-tensors", Fp8(Activations.FP8), BF16),
    "fp8 weights": ("compressed-tensors", Fp8(), torch.float32),
    "mxfp4": ("compressed-tensors", Mxfp4(), BF16),
    "pack-quantized": ("compressed-tensors", Int(4, 64, symmetric=False), BF16),
    "int-quantized": ("compressed-tensors", Int(8, None, True, Activations.INT8), BF16),
    "gptq": ("gptq", Int(4, 32), F16),
    "awq": ("awq", Int(4, 32, symmetric=False), F16),
}


def mostly_full(quick: str, *others: str) -> list:
    """The first form in the quick tier, the others in the full one."""
    return [quick, *(pytest.param(form, marks=pytest.mark.full) for form in others)]


@pytest.fixture
def make_source(tiny_model, tmp_path):
    """Writes a tiny model with random codes of a form."""

    def make(form: str, family: str = "llama", **options) -> Path:
        format, scheme, scale_dtype = FORMS[form]
        dense, out = tiny_model(family, num_hidden_layers=2, **options), tmp_path / "source"
        pack_model(dense, out, lambda module: scheme, format, scale_dtype)
        for file in dense.glob("tokenizer*"):
            shutil.copy(file, out)
        return out

    return make


def as_dense(source: Path) -> Path:
    return export_checkpoint(source, "dense", source.with_name("dense"))


@pytest.mark.parametrize("form", mostly_full(*FORMS))
def test_bytes_are_those_that_the_dense_model_gives(make_source, tmp_path, form):
    source = make_source(form)
    result = runs.compress(source, tmp_path / "out", RTN)
    runs.compress(as_dense(source), tmp_path / "of_dense", RTN)
    assert runs.same_bytes(tmp_path / "out", tmp_path / "of_dense")
    config = read_config(tmp_path / "out")
    stored = str(PackedCheckpoint.open(source).schemes["model.layers.0.mlp.up_proj"])
    assert quantization_block(config)["quant_method"] == "compressed-tensors"
    assert stored not in str(quantization_block(config))
    assert compression_block(config)["source_form"].startswith(stored)
    assert result.report["source_form"] == compression_block(config)["source_form"]
    assert any(stored in note for note in result.report["plan"]["notes"])


@pytest.mark.parametrize("form", mostly_full("mxfp4", "fp8 blocks", "awq", "fp8 weights"))
def test_layers_that_are_left_out_keep_their_codes(make_source, tmp_path, form):
    source = make_source(form)
    result = runs.compress(source, tmp_path / "out", ATTENTION)
    before, after = PackedCheckpoint.open(source), PackedCheckpoint.open(tmp_path / "out")
    for module in before.modules:
        kept = ".mlp." in module
        assert (digest(after.packed_weight(module)) == digest(before.packed_weight(module))) == kept
        assert after.schemes[module] == (before.schemes[module] if kept else Int(4, 32))
    assert verify_structure(tmp_path / "out").ok
    assert result.report["bit_compared"] == len(before.modules)
    assert "lm_head.weight" in load_file(tmp_path / "out/model.safetensors")
    expected = reference_logits(put_checkpoint(load_reference(as_dense(source)), after), TOKENS)
    found = score(load_model(tmp_path / "out", dtype="float64"), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_experts_keep_their_codes(make_source, tmp_path):
    source = make_source("fp8 blocks", "qwen3_moe")
    runs.compress(source, tmp_path / "out", QuantizeStage("rtn", Int(4, 32), ignore=("*.experts.*",)))
    before, after = PackedCheckpoint.open(source), PackedCheckpoint.open(tmp_path / "out")
    experts = [module for module in before.modules if ".experts." in module]
    assert len(experts) == 2 * 8 * 3
    assert all(digest(after.packed_weight(each)) == digest(before.packed_weight(each)) for each in experts)
    load_model(tmp_path / "out", dtype="float64")


@pytest.mark.parametrize("method", ["rtn", pytest.param("awq", marks=pytest.mark.full)])
def test_mxfp4_experts_of_gpt_oss_keep_their_codes(tmp_path, method):
    source = save_tiny_model(tmp_path / "source", "gpt_oss", **VARIANTS["gpt_oss"] | {"vocab_size": 8192})
    change_tensors(source, round_experts)
    change_config(source, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, source)
    stage = QuantizeStage(method, Int(4, 32), ignore=("*.experts.*",))
    runs.compress(source, tmp_path / "out", stage)
    before, after = PackedCheckpoint.open(source), PackedCheckpoint.open(tmp_path / "out")
    assert len(before.modules) == 2 * 8 * 3 == len(after.modules) - 2 * 4
    assert all(digest(after.packed_weight(each)) == digest(before.packed_weight(each)) for each in before.modules)
    assert torch.isfinite(score(load_model(tmp_path / "out", dtype="float64"), TOKENS)).all()


def round_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Random codes of MXFP4 in place of all experts, as gpt-oss is published."""
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        groups = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, groups, dtype=torch.uint8)


def test_tensors_beyond_the_last_layer_keep_their_codes(make_source, tmp_path):
    source = make_source("fp8 blocks")
    change_config(source, num_hidden_layers=1)
    runs.compress(source, tmp_path / "out", RTN)
    before, after = PackedCheckpoint.open(source), PackedCheckpoint.open(tmp_path / "out")
    carried = [module for module in before.modules if module.startswith("model.layers.1.")]
    assert all(digest(after.packed_weight(each)) == digest(before.packed_weight(each)) for each in carried)
    assert verify_structure(tmp_path / "out").ok


def test_measured_scales_are_left_out_and_named(make_source, tmp_path):
    source = make_source("fp8 weights")
    names = ["model.layers.0.self_attn.k_scale", "model.layers.0.mlp.up_proj.input_scale"]
    change_tensors(source, lambda tensors: tensors.update(dict.fromkeys(names, torch.ones(1))))
    result = runs.compress(source, tmp_path / "out", ATTENTION)
    assert not set(names) & set(load_file(tmp_path / "out/model.safetensors"))
    assert any(names[1] in note for note in result.report["plan"]["notes"])


@pytest.mark.full
@pytest.mark.parametrize("stages", [(RotateStage(), RTN), (PruneStage("magnitude", sparsity=0.5),)], ids=str)
def test_rotation_and_pruning_take_the_dense_values(make_source, tmp_path, stages):
    source = make_source("fp8 blocks")
    runs.compress(source, tmp_path / "out", *stages)
    runs.compress(as_dense(source), tmp_path / "of_dense", *stages)
    assert runs.same_bytes(tmp_path / "out", tmp_path / "of_dense")


@pytest.mark.full
def test_quality_is_measured_against_the_dequantized_source(make_source, tmp_path):
    source = make_source("fp8 dynamic")
    found = runs.compress(source, tmp_path / "out", RTN, measure=True).quality
    expected = runs.compress(as_dense(source), tmp_path / "of_dense", RTN, measure=True).quality
    for key in ("kl_mean", "baseline_perplexity"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6)


@pytest.mark.full
def test_a_killed_run_continues_unless_the_source_is_read_in_another_way(make_source, tmp_path):
    source = make_source("fp8 blocks")
    runs.compress(source, tmp_path / "whole", ATTENTION)
    with killed_after_block(0):
        runs.compress(source, tmp_path / "out", ATTENTION)
    other = private_copy(source, tmp_path / "other")
    config = read_config(other)["quantization_config"] | {"weight_block_size": [32, 16]}
    change_config(source, quantization_config=config)
    with pytest.raises(CheckpointError, match="weight_block_size"):
        runs.compress(source, tmp_path / "out", ATTENTION)
    change_config(source, quantization_config=config | {"weight_block_size": [32, 32]})
    runs.compress(source, tmp_path / "out", ATTENTION)
    assert runs.same_bytes(tmp_path / "out", tmp_path / "whole")


@pytest.mark.full
def test_a_search_may_leave_layers_as_the_source_has_them(make_source, tmp_path):
    source, out = make_source("fp8 blocks"), tmp_path / "out"
    offered = parse_candidates("w2g64,w4g64,dense")
    asked = SearchRequest(
        Goal(bits_per_weight=6.0), candidates=offered, measured=2, calibration=runs.SMALL, name="found"
    )
    run = RunRequest(source, str(source), asked.probe(), out, dtype="float32", measure=False)
    files = Files(tmp_path / "figures.json", tmp_path / "found.yaml", "compress search")
    carry_out(find(survey(asked, run), files, quiet=True), files, quiet=True)
    schemes = PackedCheckpoint.open(out).schemes
    assert BlockFp8((32, 32)) in schemes.values()
    assert {str(scheme) for scheme in schemes.values()} & {"w2a16 g64 sym", "w4a16 g64 sym"}
    weights = [module for module in schemes if "proj" in module]
    assert len(weights) == len(schemes) == 14


def test_the_source_writes_its_own_calibration_text(make_source, tmp_path):
    text = CalibrationOptions("self", samples=2, length=16)
    result = runs.compress(make_source("fp8 blocks"), tmp_path / "out", ATTENTION, calibration=text)
    assert result.report["calibration"]["tokens"] == 32


def test_forms_that_are_not_read_are_refused(make_source, tmp_path):
    source = make_source("fp8 blocks")
    change_config(source, quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match="'hqq'"):
        runs.prepared(source, tmp_path / "out", RTN)


@pytest.mark.full
@pytest.mark.parametrize("form", ["gptq", "pack-quantized"])
def test_columns_in_the_order_of_activations_are_taken_as_a_source(make_source, tmp_path, form):
    """Groups of columns that stand apart (desc_act)."""
    source = make_source(form)
    before, dense = PackedCheckpoint.open(source), as_dense(source)
    values = {}
    for module in before.modules:
        weight = before.packed_weight(module)
        columns = weight.qweight.shape[1]
        groups = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) // weight.scheme.group_size
        offsets = weight.qweight.double() - weight.zero_points[:, groups].double()
        values[module] = groups, (offsets * weight.scales[:, groups].double()).to(before.dtype)
    index = ".g_idx" if form == "gptq" else ".weight_g_idx"
    change_tensors(source, lambda tensors: tensors.update({f"{m}{index}": g.int() for m, (g, _) in values.items()}))
    change_tensors(dense, lambda tensors: tensors.update({f"{m}.weight": v for m, (_, v) in values.items()}))
    runs.compress(source, tmp_path / "out", ATTENTION)
    runs.compress(dense, tmp_path / "of_dense", ATTENTION)
    assert runs.same_bytes(tmp_path / "out", tmp_path / "of_dense")
    expected = reference_logits(load_reference(dense), TOKENS)
    found = score(load_model(source, dtype="float64", as_dense=True), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    with pytest.raises(CheckpointError) as refused:
        load_model(source)
    assert "compress quantize" in str(refused.value.remedy)
