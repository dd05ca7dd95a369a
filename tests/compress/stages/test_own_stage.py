"""A stage is one class: one that is added from outside is read, offered, planned and run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from runs import compress, prepared
from typer.testing import CliRunner

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.cli import make_app
from compress.common.cli import Key, demo_model_path, option, with_groups
from compress.common.errors import RecipeError
from compress.methods.base import QUANTIZATION
from compress.plan import LayerPlan, PlanRow
from compress.recipe_file import parse_recipe
from compress.stages.base import STAGES, Stage, TensorStage
from compress.stages.quantize import QuantizeStage


@dataclass(frozen=True)
class Widen(TensorStage):
    """Rounds linears again, to more bits."""

    name: ClassVar[str] = "widen"
    is_single: ClassVar[bool] = True
    added_by: ClassVar[Key | None] = ("widen_bits", int | None, option(default=None, help="Rounds again."))

    bits: int = option(default=6, limits={"at least": 2, "at most": 8}, help="Bits of a weight.")
    how: str = option(default="nearest", words=("nearest", "never"), help="nearest rounds; never keeps.")
    columns: int = option(
        default=64, written=str | int, typed=str, start="64", read=int, metavar="N", help="Columns of a group."
    )

    def apply(self, before: LayerPlan, in_features: int, ignored: bool) -> LayerPlan:
        if ignored or self.how == "never":
            return before
        return before.changed(method=QUANTIZATION.find("rtn"), scheme=Int(self.bits, self.columns))

    def notes(self, rows: Sequence[PlanRow], context_length: int | None) -> list[str]:
        return [f"widened to {self.bits} bits, context {context_length}"]


@pytest.fixture(autouse=True)
def _widen() -> Iterator[None]:
    STAGES.register(order=1)(Widen)
    yield
    STAGES.remove("widen")


def read(body: str) -> tuple[Stage, ...]:
    return parse_recipe(f"stages:\n- quantize: {{method: rtn, bits: 3}}\n- widen: {body}\n", "r.yaml").stages


def test_it_is_read_from_yaml() -> None:
    assert read("{bits: 5, columns: 32, targets: [down_proj]}")[1] == Widen(5, columns=32, targets=("down_proj",))
    assert read("{columns: '128', ignore: [o_proj]}")[1] == Widen(columns=128, ignore=("o_proj",))


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ("{bits: 9}", r"r\.yaml:3.*bits=9 "),
        ("{bits: four}", r"r\.yaml:3.*'four'"),
        ("{how: nearst}", "'nearst'.*'nearest'"),
        ("{bit: 5}", "'bit'.*'bits'"),
        ("{}\n- widen: {}", "two widen"),
    ],
)
def test_its_keys_are_checked(body: str, fact: str) -> None:
    with pytest.raises(RecipeError, match=fact):
        read(body)


def test_its_keys_are_options_of_a_command() -> None:
    built: list[Stage] = []

    def command(*, keys: Mapping[str, Any], ignore: str = "") -> None:
        built.append(Widen.build(keys, ignore=(ignore,)))

    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_groups(command, keys=Widen.written_keys(bits=7)))
    assert CliRunner().invoke(app, ["--columns", "32", "--ignore", "o_proj"]).exit_code == 0
    assert built == [Widen(7, columns=32, ignore=("o_proj",))]
    shown = re.sub(r"\s+", " ", CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout)
    assert "Bits of a weight. [default: 7]" in shown
    assert "--columns N Columns of a group. [default: 64]" in shown
    assert "--targets" not in shown


def test_an_option_adds_it_to_a_quantization(tmp_path: Path) -> None:
    arguments = ["--bits", "3", "--method", "rtn", "--widen-bits", "5", "--out", str(tmp_path / "out"), "--dry-run"]
    shown = CliRunner().invoke(make_app(), ["quantize", *arguments, "--json"])
    recipe = json.loads(shown.stdout)["recipe"]
    assert [each["stage"] for each in recipe["stages"]] == ["quantize", "widen"]
    assert (recipe["name"], recipe["stages"][1]["bits"]) == ("int3-rtn-widen", 5)


def test_it_is_planned_and_run(tmp_path: Path) -> None:
    stages = QuantizeStage("rtn", Int(3, 64), ignore=("o_proj",)), Widen(5, targets=("down_proj", "o_proj"))
    context = prepared(demo_model_path(), tmp_path / "planned", *stages)
    assert "widened to 5 bits, context" in " ".join(context.plan.notes)
    assert context.to_dict()["recipe"]["stages"][1] == {"stage": "widen", **stages[1].to_dict()}
    assert compress(demo_model_path(), tmp_path / "packed", *stages).structure.ok
    schemes = PackedCheckpoint.open(tmp_path / "packed").schemes
    bits = {name.rpartition(".")[2]: scheme.bits for name, scheme in schemes.items()}
    assert {name: bits[name] for name in ("up_proj", "down_proj", "o_proj")} == {
        "up_proj": 3,
        "down_proj": 5,
        "o_proj": 5,
    }
