"""Adapters that cannot be served are refused in one line, and nothing of them is kept."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import adapted_engine, save_adapter, shapes_of
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from compress.common.errors import CheckpointError, RequestError, ToolkitError
from runtime.adapters.config import REFUSED, LoraConfig
from runtime.cli.options import AdapterOptions
from runtime.core.adapter import parse_modules
from runtime.core.config import LoraOptions
from runtime.core.request import RequestOptions, SamplingParams
from runtime.engine.engine import Engine

Q = "model.layers.0.self_attn.q_proj"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return adapted_engine(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"), {}, max_lora_rank=8)


@pytest.fixture
def adapter(engine: Engine, tmp_path: Path) -> Path:
    """An adapter that fits."""
    spec = engine.runner.decoder.config.spec
    return save_adapter(tmp_path / "adapter", shapes_of(spec, engine.runner.adapters.modules))


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = json.loads((folder / CONFIG).read_text()) | fields
        (folder / CONFIG).write_text(json.dumps(found))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def add(name: str, *shape: int) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors.update({name: torch.zeros(shape)}))


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


FAULTS = {
    "no folder": (shutil.rmtree, "adapter"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), CONFIG),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "a pickle": (pickled, "adapter_model.bin"),
    "not JSON": (lambda folder: (folder / CONFIG).write_text("{"), CONFIG),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), CONFIG),
    "truncated": (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]), WEIGHTS),
    "garbage": (lambda folder: (folder / WEIGHTS).write_bytes(b"garbage!" * 9), WEIGHTS),
    "another method": (change_config(peft_type="IA3"), "IA3"),
    "biases": (change_config(bias="all"), "bias"),
    "subtracted from the model": (change_config(init_lora_weights="pissa"), "pissa"),
    "no rank": (change_config(r=0), "r=0"),
    "a rank of words": (change_config(rank_pattern={"q_proj": "many"}), "rank_pattern"),
    "patterns of another type": (change_config(alpha_pattern=[3]), "alpha_pattern"),
    "a broken expression": (change_config(alpha_pattern={"(": 3}), "alpha_pattern"),
    "another rank": (change_config(rank_pattern={"q_proj": 3}), Q),
    "an unknown module": (add("base_model.model.model.layers.0.self_attn.z_proj.lora_A.weight", 2, 8), "z_proj"),
    "half of a product": (change_tensors(lambda tensors: tensors.pop(f"base_model.model.{Q}.lora_A.weight")), Q),
    "another tensor": (add(f"base_model.model.{Q}.lora_magnitude_vector", 8), "lora_magnitude_vector"),
    "the head": (
        change_tensors(
            lambda tensors: tensors.update(
                {
                    "base_model.model.lm_head.lora_A.weight": torch.zeros(2, 64),
                    "base_model.model.lm_head.lora_B.weight": torch.zeros(112, 2),
                }
            )
        ),
        "lm_head",
    ),
    "another size": (add(f"base_model.model.{Q}.lora_A.weight", 2, 7), Q),
    "nothing": (change_tensors(dict.clear), WEIGHTS),
    **{f"with {name}": (change_config(**{name: True}), name) for name in REFUSED},
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_served_is_refused(engine: Engine, adapter: Path, name: str) -> None:
    damage, named = FAULTS[name]
    damage(adapter)
    with pytest.raises(CheckpointError) as error:
        engine.adapters.load("x", adapter)
    assert named in error.value.problem
    assert error.value.remedy
    assert "\n" not in str(error.value)
    assert engine.adapters.find("x") is None
    with pytest.raises(RequestError):
        engine.add_request([1, 2], SamplingParams(), None, RequestOptions(adapter="x"))
    assert not engine.has_work


def test_an_adapter_of_a_high_rank_is_refused_with_the_option(engine: Engine, tmp_path: Path) -> None:
    shapes = shapes_of(engine.runner.decoder.config.spec, [Q])
    with pytest.raises(CheckpointError) as error:
        engine.adapters.load("x", save_adapter(tmp_path, shapes, rank=9))
    assert "--max-lora-rank 9" in error.value.remedy


def test_a_name_is_taken_once(engine: Engine, adapter: Path) -> None:
    engine.adapters.load("once", adapter)
    with pytest.raises(ToolkitError):
        engine.adapters.load("once", adapter)
    engine.adapters.unload("once")
    with pytest.raises(RequestError):
        engine.adapters.unload("once")
    engine.adapters.load("once", adapter)
    engine.adapters.unload("once")


def test_files_that_changed_are_not_read_again(tmp_path: Path) -> None:
    engine = adapted_engine(save_tiny_model(tmp_path / "tiny"), {}, max_cpu_loras=1, max_loras=1)
    shapes = shapes_of(engine.runner.decoder.config.spec, [Q])
    for name in "ab":
        engine.adapters.load(name, save_adapter(tmp_path / name, shapes))
    save_adapter(tmp_path / "a", shapes, seed=1)
    with pytest.raises(RequestError) as error:
        engine.add_request([1, 2], SamplingParams(), None, RequestOptions(adapter="a"))
    assert str(tmp_path / "a") in error.value.problem
    engine.add_request([1, 2], SamplingParams(), None, RequestOptions(adapter="b"))


@pytest.mark.parametrize(
    ("fields", "rank", "scale"),
    [
        ({}, 4, 2.0),
        ({"use_rslora": True}, 4, 4.0),
        ({"rank_pattern": {"q_proj": 8}}, 8, 1.0),
        ({"rank_pattern": {"k_proj": 8, "1.self_attn.q_proj": 16}}, 4, 2.0),
        ({"rank_pattern": {r".*\.q_proj": 16}, "alpha_pattern": {"^model.layers.0.*": 4}}, 16, 0.25),
        ({"alpha_pattern": {"self_attn.q_proj": 16}, "use_rslora": True}, 4, 8.0),
    ],
    ids=str,
)
def test_rank_and_scale_of_a_module(tmp_path: Path, fields: dict[str, Any], rank: int, scale: float) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}))
    config = LoraConfig.read(tmp_path)
    assert (config.rank_of(Q), config.scale_of(Q)) == (rank, scale)


def test_options_name_adapters() -> None:
    assert parse_modules(["a=x/y", '{"name": "b", "path": "z=1"}']) == {"a": Path("x/y"), "b": Path("z=1")}
    for wrong in (["a"], ["=x"], ["a="], ["{}"], ["{"], ["[]"], ["a=x", "a=y"]):
        with pytest.raises(ToolkitError) as error:
            parse_modules(wrong)
        assert "--lora-modules" in error.value.problem


@pytest.mark.parametrize(("family", "interleaved"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_experts_in_one_parameter_become_those_of_the_checkpoint(
    tmp_path: Path, family: str, interleaved: bool
) -> None:
    """PEFT keeps the first parameter that it wraps as the inner layer, and the experts of each rank next to each
    other."""
    engine = adapted_engine(save_tiny_model(tmp_path / "model", family), {})
    spec = engine.runner.decoder.config.spec
    experts = spec.blocks[0].mixture.experts
    (inner, hidden), count, rank = experts[0].inputs[0].shape, len(experts), 2
    prefix, generator = "base_model.model.model.layers.0.mlp.experts", torch.Generator().manual_seed(0)
    shapes = {"base_layer.": (2 * inner, hidden), "": (hidden, inner)}
    tensors = {}
    for level, (rows, columns) in shapes.items():
        tensors[f"{prefix}.{level}lora_A.weight"] = torch.randn(rank * count, columns, generator=generator)
        tensors[f"{prefix}.{level}lora_B.weight"] = torch.randn(rows, rank * count, generator=generator)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    engine.adapters.load("a", folder)
    adapter = engine.adapters.find("a")
    assert len(adapter.factors) == 3 * count
    for level, names in (("base_layer.", ("gate_proj", "up_proj")), ("", ("down_proj",))):
        down = tensors[f"{prefix}.{level}lora_A.weight"].double().reshape(count, rank, -1)
        up = tensors[f"{prefix}.{level}lora_B.weight"].double().reshape(-1, rank, count)
        whole = torch.einsum("ore,eri->eoi", up, down)
        for part, name in enumerate(names):
            rows = len(whole[0]) // len(names)
            own = whole[:, part :: len(names)] if interleaved else whole[:, part * rows : (part + 1) * rows]
            for number in range(count):
                factors = adapter.factors[f"model.layers.0.mlp.experts.{number}.{name}"]
                torch.testing.assert_close(factors.up @ factors.down, own[number])


def test_options_of_a_server_that_contradict_each_other_are_refused() -> None:
    named = LoraOptions(lora_modules=["a=x"])
    assert AdapterOptions().checked(named, ["model"]) == {"a": Path("x")}
    assert AdapterOptions(allow_runtime_lora_updating=True).checked(LoraOptions(enable_lora=True), ["model"]) == {}
    with pytest.raises(ToolkitError) as error:
        AdapterOptions().checked(named, ["b", "a"])
    assert "--served-model-name" in error.value.remedy
    with pytest.raises(ToolkitError) as error:
        AdapterOptions(allow_runtime_lora_updating=True).checked(LoraOptions(), ["model"])
    assert "--enable-lora" in error.value.remedy
