"""The stage that rotates inputs: which layers it takes, and what it refuses."""

import json
from pathlib import Path

import pytest
from runs import prepared
from typer.testing import CliRunner

from compress.checkpoint.weights import Activations, Int, RotatedInputs
from compress.cli import make_app
from compress.common.cli import demo_model_path
from compress.common.errors import RecipeError, SchemeError, ToolkitError
from compress.plan import Plan
from compress.recipe_file import parse_recipe
from compress.stages.base import Stage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate_inputs import RotateInputsStage

W4A4 = Int(4, 64, activations=Activations.INT4)
DOWN = RotateInputsStage(targets=("down_proj",))


def plan(tmp_path: Path, *stages: Stage) -> Plan:
    return prepared(demo_model_path(), tmp_path / "out", *stages).plan


def test_an_option_rotates_the_inputs_of_the_layers_it_names(tmp_path: Path) -> None:
    arguments = ["--bits", "4", "--method", "rtn", "--activation-bits", "4", "--rotate-inputs", "down_proj"]
    found = CliRunner().invoke(
        make_app(), ["quantize", *arguments, "--out", str(tmp_path / "o"), "--dry-run", "--json"]
    )
    recipe = json.loads(found.stdout)["recipe"]
    assert [each["stage"] for each in recipe["stages"]] == ["quantize", "rotate_inputs"]
    assert (recipe["name"], recipe["stages"][1]["targets"]) == ("int4-rtn-rotated-inputs", ["down_proj"])


def test_planned_forms(tmp_path: Path) -> None:
    schemes = plan(tmp_path, QuantizeStage("rtn", W4A4), DOWN).schemes
    found = {name.rpartition(".")[2]: scheme for name, scheme in schemes.items()}
    assert (found["down_proj"], found["up_proj"]) == (RotatedInputs(W4A4, 128), W4A4)
    text = "stages:\n- quantize: {method: rtn}\n- rotate_inputs: {targets: [o_proj], largest_order: 64}\n"
    stages = parse_recipe(text, "r.yaml").stages
    schemes = plan(tmp_path, *stages).schemes
    assert {name.rpartition(".")[2] for name, scheme in schemes.items() if scheme.hadamard == 64} == {"o_proj"}


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([DOWN, QuantizeStage("rtn", W4A4)], "no stage before it quantizes"),
        ([QuantizeStage("rtn", W4A4, ignore=("down_proj",)), DOWN], "no stage before it quantizes"),
        ([QuantizeStage("signround", W4A4), DOWN], "signround does not support"),
        ([QuantizeStage("rtn", W4A4, outlier_columns=0.01), DOWN], "cannot be combined with rotated inputs"),
        ([PruneStage("magnitude", sparsity=0.5), QuantizeStage("gptq", Int(4)), DOWN], "has no exact zeros"),
        ([QuantizeStage("rtn", W4A4), RotateInputsStage(targets=("downproj",))], "'downproj' matches no linear"),
        ([QuantizeStage("rtn", W4A4), RotateInputsStage(largest_order=96)], "96 is not a power of two"),
        ([QuantizeStage("rtn", Int(8, 128)), RotateInputsStage(targets=("lm_head",))], "lm_head"),
    ],
)
def test_refusals(stages: list[Stage], reason: str, tmp_path: Path) -> None:
    with pytest.raises((RecipeError, SchemeError), match=reason):
        plan(tmp_path, *stages)


def test_orders_have_limits() -> None:
    with pytest.raises(ToolkitError, match="largest_order"):
        RotateInputsStage(largest_order=256)
