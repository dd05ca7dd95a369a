"""Input columns in 16 bits next to the codes: chosen, rounded around, stored, checked, exported and multiplied."""

from pathlib import Path

import pytest
import torch
from runs import compress, foreseen_bytes, prepared, some_tokens, with_outliers

from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import quantize_tokens, round_in_range
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Activations, Int, OutlierColumns, Scheme
from compress.checkpoint.weights.base import StoredTensors, digest
from compress.checkpoint.weights.outlier_columns import OutlierWeight, without_columns
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError, RecipeError, SchemeError
from compress.evaluate.scorers import open_scorer
from compress.methods.gptq import quantize_gptq
from compress.methods.outlier_columns import beside_outliers, highest, quantize_gptq_beside, sensitivity
from compress.methods.shared.hessian import HessianOptions, factorize
from compress.pipeline.finish import compare_with_report
from compress.recipe_file import parse_recipe
from compress.stages.base import Stage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.model.composed import SideBySide, WithOutliers
from runtime.model.loader import load_model

PAGE = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"


def inputs_and_weight(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated inputs `[512, 128]`, four of them large, and a weight `[96, 128]`."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(512, 128, generator=generator) @ torch.randn(128, 128, generator=generator) * 0.1
    mixed[:, [3, 40, 41, 127]] *= 20
    return mixed, torch.randn(96, 128, generator=generator) * 0.05


@pytest.mark.parametrize("scheme", [Int(2, 32), Int(3, 64, False), Int(8, None, activations=Activations.INT8)])
def test_what_is_stored_is_read_back_and_as_large_as_computed(scheme) -> None:
    _, weight = inputs_and_weight()
    columns, scheme = torch.tensor([3, 40, 127]), OutlierColumns(scheme, 3)
    stored = beside_outliers(weight, scheme.inner.round(weight.index_fill(1, columns, 0)), columns, scheme)
    tensors = COMPRESS_RUNTIME.encode("m", stored, torch.bfloat16)

    def get(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(name)
        return tensors[name]

    again = scheme.read(StoredTensors("m", get))
    assert digest(again) == digest(stored)
    assert COMPRESS_RUNTIME.modules(tensors) == ["m"]
    size = sum(8 * tensor.nbytes for name, tensor in tensors.items() if not name.endswith("_shape"))
    assert size == scheme.stored_bits(96, 128)
    values = again.dequantize(torch.bfloat16)
    assert torch.equal(values[:, columns], weight[:, columns].bfloat16())
    assert Scheme.from_dict(scheme.to_dict()) == scheme


def test_the_example_of_the_format_page() -> None:
    scheme = OutlierColumns(Int(4, None), 1)
    codes = torch.tensor([[9, 7, 8, 10]], dtype=torch.uint8)
    scale, zero = torch.tensor([[0.5]]).bfloat16(), torch.tensor([[8]], dtype=torch.uint8)
    base = scheme.inner.weight(codes, scale, zero)
    weight = OutlierWeight(base, torch.tensor([2]), torch.tensor([[3.25]]).bfloat16(), scheme)
    tensors = COMPRESS_RUNTIME.encode("m", weight, torch.bfloat16)
    assert f"0x{int(tensors['m.weight_packed'][0, 0]):08x}" in PAGE.read_text()
    assert weight.dequantize().tolist() == [[0.5, -0.5, 3.25, 1.0]]


def test_parts_that_contradict_each_other_are_refused() -> None:
    _, weight = inputs_and_weight()
    scheme, columns = OutlierColumns(Int(4, 32), 2), torch.tensor([5, 9], dtype=torch.int32)
    base = without_columns(scheme.inner.round(weight), columns)
    values = weight[:, columns.long()].bfloat16()
    OutlierWeight(base, columns, values, scheme)
    with pytest.raises(SchemeError, match=r"\(1,\) .*\(\d+, 2\) "):
        OutlierWeight(base, columns[:1], values, scheme)
    with pytest.raises(SchemeError, match=r" 0 .* 127$"):
        OutlierWeight(base, columns.flip(0), values, scheme)
    with pytest.raises(SchemeError, match=r" 0 .* 127$"):
        OutlierWeight(base, torch.tensor([5, 128], dtype=torch.int32), values, scheme)
    with pytest.raises(SchemeError, match="zero point"):
        OutlierWeight(scheme.inner.round(weight), columns, values, scheme)
    with pytest.raises(SchemeError, match=r"2:4.*outlier"):
        Scheme.from_dict({"bits": 4, "group_size": 32, "sparsity": "2:4", "outliers": 2})
    with pytest.raises(SchemeError, match="128 inputs"):
        COMPRESS_RUNTIME.check(OutlierColumns(Int(4, 32), 128), (96, 128))


def test_the_costly_columns_are_chosen() -> None:
    x, weight = inputs_and_weight()
    importance = x.square().mean(0)
    score = sensitivity([weight, weight], Int(3, 32), importance)
    error = (round_in_range(weight, Int(3, 32)) - weight).square().sum(0) * importance
    torch.testing.assert_close(score, 2 * error)
    assert highest(score, 4).tolist() == [3, 40, 41, 127]


def test_columns_in_16_bits_make_up_for_the_others() -> None:
    x, weight = inputs_and_weight()
    hessian = x.T @ x / len(x)
    scheme, columns = OutlierColumns(Int(2, 32), 4), torch.tensor([3, 40, 41, 127])
    factor = factorize(hessian, HessianOptions(last=tuple(columns.tolist())))
    assert sorted(factor.order[-4:].tolist()) == columns.tolist()
    joint = quantize_gptq_beside(weight, factor, scheme, columns)
    rest = weight.index_fill(1, columns, 0.0)
    apart = beside_outliers(weight, quantize_gptq(rest, factorize(hessian), scheme.inner), columns, scheme)
    plain = quantize_gptq(weight, factorize(hessian), scheme.inner)

    def error(values: torch.Tensor) -> float:
        return float((x @ (values - weight).T).square().mean())

    # Given the codes, no other values of these columns are better under the damped Hessian.
    change = quantize_gptq_beside(weight, factor, scheme, columns, torch.float32).dequantize() - weight
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(128)
    slope = change @ damped[:, columns]
    assert slope.abs().max() < 1e-3 * (change @ damped).abs().max()
    assert error(joint.dequantize()) < error(apart.dequantize()) < error(plain.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", [Int(4, 32), Int(3, 64, False), Int(8, None), Int(8, None, True, Activations.INT8)])
def test_products_equal_the_dequantized_weight(scheme, dtype) -> None:
    x, weight = inputs_and_weight()
    columns, scheme = torch.tensor([3, 40, 41, 127]), OutlierColumns(scheme, 4)
    stored = beside_outliers(weight, scheme.inner.round(weight.index_fill(1, columns, 0)), columns, scheme)
    target = Target(torch.device("cpu"), dtype)
    x = x[:5].to(dtype)
    for kernels in ("auto", "reference"):
        kernel = choose_linear(scheme.inner, 128, target, kernels).kernel
        base = kernel.prepare(stored.base, None, target)
        linear = WithOutliers(base, columns, stored.values.to(dtype).T.contiguous())
        seen = x.float()
        if scheme.activation_bits:
            levels, steps = quantize_tokens(seen.index_fill(1, columns, 0.0))
            seen = torch.where(torch.isin(torch.arange(128), columns), seen, levels * steps)
        exact = seen @ stored.dequantize().T
        torch.testing.assert_close(linear(x).float(), exact, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize(
    "stage",
    [
        QuantizeStage("gptq", Int(2, 32), outlier_columns=0.02),
        QuantizeStage("awq", Int(4, 64), outlier_columns=3),
        QuantizeStage("rtn", Int(8, None, activations=Activations.INT8), outlier_columns=4),
    ],
    ids=["w2-gptq", "w4-awq", "w8a8"],
)
def test_a_model_is_compressed_verified_served_and_exported(tiny_model, tmp_path, stage) -> None:
    source, out = tiny_model("llama"), tmp_path / "packed"
    plan = prepared(source, out, stage).plan
    assert any("16-bit columns" in note for note in plan.notes)
    result = compress(source, out, stage)
    packed = PackedCheckpoint.open(out)
    assert packed.format == "compress-runtime"
    assert packed.schemes == dict(sorted(plan.schemes.items()))
    assert result.structure.bits_per_weight == pytest.approx(plan.bits_per_weight, rel=1e-12)
    assert verify_structure(out).ok
    assert compare_with_report(out) == []
    down, query, key = (packed.packed_weight(f"model.layers.0.{name}") for name in DOWN_QUERY_KEY)
    wanted = stage.outlier_columns
    assert [len(each.columns) for each in (down, query)] == (
        [wanted, wanted] if wanted >= 1 else [round(wanted * 256), round(wanted * 128)]
    )
    assert torch.equal(query.columns, key.columns)
    decoder = load_model(out)
    assert isinstance(decoder.layers[0].attention.qkv, WithOutliers)
    assert not isinstance(decoder.layers[0].attention.qkv, SideBySide)
    assert decoder.nbytes == foreseen_bytes(out, decoder.dtype)
    tokens = some_tokens()
    served = open_scorer(out, dtype="float32").logits(tokens)
    if stage.scheme.activation_bits is None:
        crossed = open_scorer(out, "transformers", dtype="float32").logits(tokens)
        torch.testing.assert_close(served, crossed, rtol=1e-3, atol=1e-3)
    assert not PackedCheckpoint.open(export_checkpoint(out, "dense", tmp_path / "dense")).schemes
    with pytest.raises(SchemeError, match=r"compressed-tensors .*columns.*--format dense"):
        export_checkpoint(out, "compressed-tensors", tmp_path / "other")


DOWN_QUERY_KEY = ("mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj")


def test_eight_bit_inputs_lose_less_when_their_largest_columns_are_apart(tiny_model, tmp_path) -> None:
    source = with_outliers(tiny_model("llama"), tmp_path / "outliers", [3, 40, 41, 127], 64.0)
    tokens = some_tokens(96)
    dense = open_scorer(source, dtype="float32").logits(tokens)
    error = {}
    for count in (None, 4):
        stage = QuantizeStage("rtn", Int(8, None, activations=Activations.INT8), outlier_columns=count)
        compress(source, tmp_path / str(count), stage, *([] if count else [at_least_one_pass()]))
        error[count] = (open_scorer(tmp_path / str(count), dtype="float32").logits(tokens) - dense).square().mean()
    assert error[4] < 0.5 * error[None]


def at_least_one_pass() -> Stage:
    """A stage that needs a calibration and changes almost nothing, so both runs have one."""
    return QuantizeStage("gptq", Int(8, None), targets=("model.layers.0.mlp.down_proj",))


def test_recipes_and_stages_say_what_makes_no_sense(tiny_model, tmp_path) -> None:
    recipe = parse_recipe("stages:\n  - quantize: {method: gptq, bits: 2, group_size: 64, outlier_columns: 0.01}", "r")
    assert recipe.stages[0].outlier_columns == 0.01
    assert recipe.stages[0].scheme_for(4096).num_outliers == 41
    assert QuantizeStage("rtn", Int(), outlier_columns=5).scheme_for(4096).num_outliers == 5
    assert QuantizeStage("rtn", Int(), outlier_columns=5).needs_calibration
    for wrong in (0, -1, 1.5, float("nan"), float("inf")):
        with pytest.raises(RecipeError, match=f"outlier_columns={wrong:g} "):
            QuantizeStage("gptq", Int(), outlier_columns=wrong)
    with pytest.raises(RecipeError, match=r"pruned .*outlier"):
        prepared(
            tiny_model("llama"),
            tmp_path / "unwritten",
            PruneStage("wanda", None, 0.5),
            QuantizeStage("gptq", Int(4, 64), outlier_columns=2),
        )
    stage = QuantizeStage("rtn", Int(8, None), outlier_columns=2, targets=("embed_tokens",))
    with pytest.raises(RecipeError, match=r"embed_tokens.*outlier_columns"):
        prepared(tiny_model("llama"), tmp_path / "unwritten", stage)
