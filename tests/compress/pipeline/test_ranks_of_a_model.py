"""Ranks shared out over the whole model: one budget, a size, and K/V projections alone."""

import pytest
from runs import compress, prepared

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.common.errors import RecipeError
from compress.methods.low_rank import RankedLinear, share_out, share_out_over_blocks
from compress.recipe import FactorizeStage, QuantizeStage
from compress.recipe_file import parse_recipe


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
    for module in plan.assignments:
        rows, columns = next(row.shape for row in plan.rows if row.tensor == f"{module}.weight")
        weight = packed.weight(module)
        low = isinstance(weight, LowRankWeight)
        kept += weight.scheme.rank * (rows + columns) if low else rows * columns
        whole += rows * columns
    assert 0.65 * whole < kept <= 0.7 * whole
    ranks = {linear["rank"] for block in result.report["blocks"] for linear in block["linears"]}
    assert len(ranks) >= 3


def test_a_size_decides_the_share(tiny_model, tmp_path) -> None:
    dense = prepared(tiny_model(), tmp_path / "out", FactorizeStage()).plan.bytes_before
    target = dense - 300_000
    stage = FactorizeStage("svd", allocation="model", target_size=target)
    result = compress(tiny_model(), tmp_path / "out", stage)
    stored = sum(tensor.nbytes for tensor in result.structure.dense) + result.structure.quantized_bytes
    assert 0.98 * target < stored <= target
    for size, problem in ((1000, "low rank cannot give 1,000 bytes"), (2 * dense, "Choose a smaller size")):
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
