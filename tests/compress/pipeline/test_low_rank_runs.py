"""Low rank from a checkpoint to a served one: two factors on disk, two products, sizes as computed."""

import pytest
import torch
from folders import change_tensors
from runs import assert_served_as_exported, compress, foreseen_bytes, prepared

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int, LowRank
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import RecipeError, SchemeError, ToolkitError
from compress.common.workers import Workers
from compress.methods import base
from compress.methods.low_rank import RankedLinear, share_out, share_out_over_blocks
from compress.pipeline.compress_layer import decompose_block
from compress.pipeline.finish import compare_with_report
from compress.plan import Factoring, LayerPlan
from compress.recipe import CalibrationOptions
from compress.recipe_file import parse_recipe
from compress.stages.factorize import FactorizeStage
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model
from runtime.speculative.draft_model import round_layers


@pytest.mark.parametrize("method", ["svd-llm", "asvd", "svd"])
@pytest.mark.parametrize("quantize", [None, QuantizeStage("rtn", Int(8, None)), QuantizeStage("gptq", Int(4, 8))])
def test_factors_are_packed_verified_and_served(tiny_model, tmp_path, method, quantize) -> None:
    source, out = tiny_model("llama"), tmp_path / "packed"
    stages = [FactorizeStage(method, 0.8, "uniform"), *([quantize] if quantize else [])]
    plan = prepared(source, out, *stages).plan
    result = compress(source, out, *stages)
    assert result.structure.ok
    packed = PackedCheckpoint.open(out)
    assert packed.format == "compress-runtime"
    assert packed.schemes == dict(sorted(plan.schemes.items()))
    # Uniform ranks are known before: the plan is exact.
    assert result.structure.bits_per_weight == pytest.approx(plan.bits_per_weight, rel=1e-12)
    assert result.structure.quantized_bytes * 8 == sum(
        scheme.stored_bits(*packed.shape(module), 8 * packed.dtype.itemsize)
        for module, scheme in packed.schemes.items()
    )
    for module in packed.modules:
        weight = packed.weight(module)
        assert isinstance(weight, LowRankWeight)
        rows, columns = weight.shape
        assert weight.scheme.rank * (rows + columns) <= 0.8 * rows * columns
    assert verify_structure(out).ok
    assert compare_with_report(out) == []
    assert_served_as_exported(out, tmp_path / "dense")


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama_biased", "qwen2", "qwen3", "mistral"])
def test_biases_and_other_families(tiny_model, tmp_path, family) -> None:
    out = tmp_path / "packed"
    compress(tiny_model(family), out, FactorizeStage("asvd", 0.6), QuantizeStage("gptq", Int(8, None)))
    assert_served_as_exported(out, tmp_path / "dense")


def test_rounding_by_gptq_loses_less_than_to_nearest(tiny_model, tmp_path) -> None:
    stage, errors = FactorizeStage("svd-llm", 0.8, "uniform"), {}
    for method in ("gptq", "rtn"):
        out = tmp_path / method
        blocks = compress(tiny_model("llama"), out, stage, QuantizeStage(method, Int(4, None))).report["blocks"]
        errors[method] = blocks[0]["relative_error"]
    assert errors["gptq"] < errors["rtn"]


@pytest.mark.full
def test_factorized_layers_stand_beside_smoothed_ones(tiny_model, tmp_path) -> None:
    """AWQ folds o_proj's scales into v_proj before v_proj is decomposed."""
    errors = {}
    for method in ("awq", "rtn"):
        out = tmp_path / method
        stages = (
            FactorizeStage("svd-llm", 0.8, targets=("v_proj",)),
            QuantizeStage(method, Int(4, 64), ignore=("v_proj",)),
        )
        result = compress(tiny_model("llama", num_key_value_heads=4), out, *stages)
        assert result.structure.ok
        assert PackedCheckpoint.open(out).schemes["model.layers.0.self_attn.v_proj"].rank
        block = result.report["blocks"][0]
        assert any("v_proj" in each["source"] for each in block["smoothing"]) == (method == "awq")
        errors[method] = block["relative_error"]
    assert errors["awq"] < 1.02 * errors["rtn"]


def test_unreached_layers_say_that_they_were_decomposed_plainly() -> None:
    ranked = decompose_block(
        {"up": torch.randn(32, 64)},
        {"up": LayerPlan(None, LowRank(None, 8), factoring=Factoring(base.FACTORIZATION.find("svd-llm"), 0.8))},
        (),
        [{}],
        Workers([torch.device("cpu")]),
    )
    assert ranked["up"].rank == 8
    assert ranked["up"].whitening.recovery == "svd: no calibration token reached this layer"


def test_served_as_two_products_that_are_not_fused(tiny_model, tmp_path) -> None:
    out = tmp_path / "packed"
    compress(tiny_model("llama"), out, FactorizeStage("svd", 0.5, "uniform", targets=("q_proj", "down_proj")))
    model = load_model(out, dtype="float32")
    assert any("q_proj, right factor" in line for line in model.description)
    assert any("down_proj, left factor" in line for line in model.description)
    assert any("gate_proj+up_proj" in line for line in model.description)
    layers = [part for each in model.layers for part in each.linears]
    outside = model.embedding.nbytes + model.head.nbytes
    assert foreseen_bytes(out, torch.float32) == outside + sum(part.nbytes for part in layers)


@pytest.mark.parametrize("bits", [None, 8])
def test_self_drafts_by_rounding_multiply_factors_out(tiny_model, tmp_path, bits) -> None:
    out = tmp_path / "packed"
    quantize = [QuantizeStage("rtn", Int(bits, None))] if bits else []
    compress(tiny_model("llama"), out, FactorizeStage("svd", 0.8, "uniform"), *quantize)
    target = load_model(out, dtype="float32")
    assert any("w4a16" in line for line in round_layers(target, out, 4).description)
    if bits:
        with pytest.raises(ToolkitError, match=r"q_proj .* \d\S* .* 8 .*--speculative-model"):
            round_layers(target, out, 8)


def test_blocks_share_their_ranks_out_and_keep_what_would_not_shrink(tmp_path) -> None:
    out = tmp_path / "packed"
    calibration = CalibrationOptions(samples=8, length=128)
    result = compress(demo_model_path(), out, FactorizeStage("svd-llm", 0.8), calibration=calibration)
    assert result.structure.ok
    assert result.structure.total_bytes == pytest.approx(result.report["plan"]["bytes_after"], rel=0.02)
    assert compare_with_report(out) == []
    linears = [linear for block in result.report["blocks"] for linear in block["linears"]]
    whole = {linear["module"] for linear in linears if linear["kept_whole"]}
    ranked = {linear["module"]: linear["rank"] for linear in linears if linear["rank"]}
    assert whole
    assert ranked
    assert len(whole) + len(ranked) == 42
    packed, dense = PackedCheckpoint.open(out), PackedCheckpoint.open(demo_model_path())
    assert {module: scheme.rank for module, scheme in packed.schemes.items()} == ranked
    assert len(set(ranked.values())) > 3
    for module in whole:
        assert torch.equal(packed.weight(module), dense.weight(module))
    assert {tensor.name: tensor.reason for tensor in result.structure.dense}[
        f"{min(whole)}.weight"
    ] == "kept whole: factors of this rank would not have fewer weights"
    for index in range(6):
        shapes = {name: dense.shape(name) for name in (*ranked, *whole) if name.startswith(f"model.layers.{index}.")}
        before = {name: rows * columns for name, (rows, columns) in shapes.items()}
        kept = sum(ranked[name] * sum(shapes[name]) if name in ranked else before[name] for name in before)
        assert 0.78 < kept / sum(before.values()) <= 0.8


@pytest.mark.full
def test_layers_kept_whole_are_quantized_like_others(tmp_path) -> None:
    out = tmp_path / "packed"
    stages = FactorizeStage("svd", 0.8), QuantizeStage("rtn", Int(4, 32))
    result = compress(demo_model_path(), out, *stages)
    assert result.structure.total_bytes == pytest.approx(result.report["plan"]["bytes_after"], rel=0.02)
    schemes = PackedCheckpoint.open(out).schemes
    assert len(schemes) == 42
    assert Int(4, 32) in schemes.values()
    assert any(scheme.rank for scheme in schemes.values())
    assert result.structure.ok
    assert compare_with_report(out) == []


def test_factors_export_only_dense(tiny_model, tmp_path) -> None:
    compress(tiny_model("llama"), tmp_path / "packed", FactorizeStage("svd", 0.5, "uniform"))
    with pytest.raises(SchemeError, match=r"compressed-tensors .*factors.*--format dense"):
        export_checkpoint(tmp_path / "packed", "compressed-tensors", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_broken_factors_are_found(tiny_model, tmp_path) -> None:

    out = tmp_path / "packed"
    compress(tiny_model("llama"), out, FactorizeStage("svd", 0.5, "uniform"))
    name = "model.layers.0.mlp.up_proj.right.weight"
    change_tensors(out, lambda tensors: tensors[name][0, :1].fill_(float("nan")))
    broken = name.removesuffix(".weight")
    assert any(problem.startswith(f"{broken} holds NaN") for problem in verify_structure(out).problems)
    change_tensors(out, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    assert any("contradict each other" in problem for problem in verify_structure(out).problems)


def falling(first: float, ratio: float, count: int = 64) -> list[float]:
    return [first * ratio**index for index in range(count)]


def test_ranks_move_to_where_they_save_the_larger_share() -> None:
    steep = {"a": RankedLinear(64, 64, 8, falling(1.0, 0.6))}
    flat = {"b": RankedLinear(64, 64, 8, falling(1.0, 0.97))}
    alone = [share_out(each, 0.75) for each in (steep, flat)]
    assert alone == [{"a": 24}, {"b": 24}]
    ranks = share_out_over_blocks([steep, flat], 0.75)
    assert ranks == {"a": None, "b": 16}
    # One budget; and as a share of what each block loses alone, nothing of one is lost, a little more of the other.
    assert 64 * 64 + 16 * 128 <= 0.75 * 2 * 64 * 64
    energies = flat["b"].energies
    assert sum(energies[16:]) / sum(energies[24:]) < 2


def test_the_size_of_outputs_does_not_count_between_blocks() -> None:
    small = {"a": RankedLinear(64, 64, 8, falling(1.0, 0.9))}
    large = {"b": RankedLinear(64, 64, 8, falling(1e6, 0.9))}
    ranks = share_out_over_blocks([small, large], 0.75)
    assert ranks["a"] == ranks["b"] == 24


@pytest.mark.parametrize("method", ["svd-llm", "svd"])
@pytest.mark.parametrize("quantize", [None, QuantizeStage("rtn", Int(8, None))])
def test_a_model_keeps_its_share_whatever_its_layers_do(tiny_model, tmp_path, method, quantize) -> None:
    stages = [FactorizeStage(method, 0.7, "model"), *([quantize] if quantize else [])]
    plan = prepared(tiny_model(), tmp_path / "out", *stages).plan
    assert any("shared out over the whole model" in note for note in plan.notes)
    result = compress(tiny_model(), tmp_path / "out", *stages)
    assert result.structure.ok
    packed = PackedCheckpoint.open(tmp_path / "out")
    kept = whole = 0
    for module in plan.layer_plans:
        rows, columns = next(row.shape for row in plan.rows if row.tensor == f"{module}.weight")
        weight = packed.weight(module)
        low = isinstance(weight, LowRankWeight)
        kept += weight.scheme.rank * (rows + columns) if low else rows * columns
        whole += rows * columns
    assert 0.65 * whole < kept <= 0.7 * whole
    ranks = {linear["rank"] for block in result.report["blocks"] for linear in block["linears"]}
    assert len(ranks) >= 3


@pytest.mark.full
def test_a_size_decides_the_share(tiny_model, tmp_path) -> None:
    dense = prepared(tiny_model(), tmp_path / "out", FactorizeStage()).plan.bytes_before
    target = dense - 300_000
    stage = FactorizeStage("svd", allocation="model", target_size=target)
    result = compress(tiny_model(), tmp_path / "out", stage)
    stored = sum(tensor.nbytes for tensor in result.structure.dense) + result.structure.quantized_bytes
    assert 0.98 * target < stored <= target
    for size, problem in ((1000, " 1,000 .*quantize"), (2 * dense, f" {2 * dense:,} .*smaller")):
        with pytest.raises(RecipeError, match=problem):
            prepared(tiny_model(), tmp_path / "no", FactorizeStage("svd", allocation="model", target_size=size))


def test_a_size_in_a_recipe() -> None:
    text = "stages:\n- factorize: {allocation: model, target_size: 1.5MB}\n"
    assert parse_recipe(text, "r.yaml").stages == (FactorizeStage(allocation="model", target_size=1_500_000),)
    with pytest.raises(RecipeError, match=r"r.yaml:2.*target_size=1500000.*'block'"):
        parse_recipe("stages:\n- factorize: {target_size: 1.5MB}\n", "r.yaml")


def test_keys_and_values_alone(tiny_model, tmp_path) -> None:
    stage = FactorizeStage("svd-llm", 0.5, "model", targets=("k_proj", "v_proj"))
    result = compress(tiny_model(), tmp_path / "out", stage)
    packed = PackedCheckpoint.open(tmp_path / "out")
    assert {module.rpartition(".")[2] for module in packed.modules} <= {"k_proj", "v_proj"}
    assert len(packed.modules) >= 3
    assert result.structure.ok
