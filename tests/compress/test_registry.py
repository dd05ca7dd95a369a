"""The registry of methods: one that is added from outside works everywhere, and the pipeline names none."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

import compress.pipeline
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.cli import make_app
from compress.common.cli import demo_model_path, option
from compress.common.errors import RecipeError
from compress.methods import base
from compress.methods.base import QUANTIZATION, Layer, MethodOptions, QuantizationMethod, make_options, register
from compress.recipe_file import parse_recipe


@dataclass(frozen=True)
class ToyOptions(MethodOptions):
    shift: int = option(default=0, limits={"at least": 0}, help="Steps of the grid that every weight is moved by.")


class Toy(QuantizationMethod):
    """Rounds to nearest, and then adds to the codes."""

    name: ClassVar[str] = "toy"
    help: ClassVar[str] = "a method that is not in the package"
    Options: ClassVar[type] = ToyOptions

    def compress(self, layer: Layer) -> Any:
        rounded = QUANTIZATION.find("rtn").compress(layer)
        layer.details["recovery"] = f"toy: moved by {layer.options.shift}"
        return rounded.changed(lambda each: each if each.is_floating_point() else shifted(each, layer.options.shift))


def shifted(codes: Any, shift: int) -> Any:
    """Return codes moved by a number of steps; zero points, which have fewer columns, stay."""
    return codes if codes.shape[1] < 32 else (codes.int() + shift).clamp(0, 15).to(codes.dtype)


@pytest.fixture
def toy() -> Iterator[None]:
    register(Toy)
    yield
    base.QUANTIZATION.remove("toy")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(make_app(), [str(each) for each in arguments], env={"COLUMNS": "200"})


def test_a_method_from_outside_stands_in_the_help(toy) -> None:
    shown = run("quantize", "--help").stdout
    assert "toy (a method that is not in the package)" in re.sub(r"[│\s]+", " ", shown)
    assert "--shift" in shown


def test_a_method_from_outside_stands_in_plan_recipe_and_report(toy, tmp_path: Path) -> None:
    text = "stages:\n  - quantize: {method: toy, bits: 4, group_size: 64, shift: 1}\n"
    (stage,) = parse_recipe(text, "r.yaml").stages
    assert (stage.method, stage.options) == ("toy", ToyOptions(1))
    recipe, out = tmp_path / "r.yaml", tmp_path / "packed"
    recipe.write_text(text)
    plan = json.loads(run("run", recipe, "--out", out, "--dry-run", "--json").stdout)
    assert "toy" in {each["method"] for each in plan["layers"]}
    result = run("quantize", "--method", "toy", "--shift", 1, "--group-size", 64, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads((out / "compression_report.json").read_text())
    assert {each["method"] for block in report["blocks"] for each in block["linears"]} == {"toy"}
    assert {each["recovery"] for each in report["recovered"]} == {"toy: moved by 1"}
    assert report["recipe"]["stages"][0]["shift"] == 1
    name = report["blocks"][0]["linears"][0]["module"]
    packed = PackedCheckpoint.open(out).weight(name)
    dense = TensorFiles.open(demo_model_path()).tensor(f"{name}.weight").float()
    steps = (packed.dequantize() - dense) / packed.scales.float().repeat_interleave(64, 1)
    assert 0.5 < float(steps.mean()) < 1.1


def test_its_options_are_checked(toy) -> None:
    with pytest.raises(RecipeError, match="shift=-1"):
        parse_recipe("stages:\n  - quantize: {method: toy, shift: -1}\n", "r.yaml")
    with pytest.raises(RecipeError, match=r"r\.yaml:2: .*shift=1 .* rtn") as caught:
        parse_recipe("stages:\n  - quantize: {method: rtn, shift: 1}\n", "r.yaml")
    assert "toy" in caught.value.remedy
    with pytest.raises(RecipeError, match="shift"):
        parse_recipe("stages:\n  - quantize: {method: toy, shift: 1.5}\n", "r.yaml")


def test_a_name_is_taken_once(toy) -> None:
    with pytest.raises(ValueError, match="toy"):
        register(Toy)


def test_an_option_of_another_method_names_the_methods_that_take_it() -> None:
    with pytest.raises(RecipeError) as caught:
        make_options(QUANTIZATION.find("awq"), {"alpha": 0.5})
    assert "gptaq" in caught.value.remedy
    assert "smoothquant" in caught.value.remedy


def literals(path: Path) -> Iterator[str]:
    """Yields the strings of a module except docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_the_pipeline_names_no_method() -> None:
    names = {name for kind in base.METHODS for name in base.METHODS[kind]}
    assert {"awq", "gptq", "wanda", "svd-llm"} <= names
    folder = Path(compress.pipeline.__path__[0])
    found = {
        (path.name, word)
        for path in folder.glob("*.py")
        for text in literals(path)
        for word in re.findall(r"[a-z][a-z0-9-]+", text.lower())
        if word in names
    }
    assert not found
