"""Layers beyond `num_hidden_layers` and heads of multi-token prediction: planned, carried along, verified."""

from pathlib import Path

import pytest
import runs
import torch
from folders import change_config, change_tensors, private_copy
from safetensors.torch import load_file

from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.common.errors import CheckpointError, RecipeError
from compress.plan_notes import CARRIED
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

STAGE = QuantizeStage("rtn", Int(4, 64))
HEAD = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
"""Modules that a layer of multi-token prediction has in addition to those of a block (DeepSeek-V3, GLM-4.5)."""


def add_layer(tensors: dict[str, torch.Tensor]) -> None:
    """A complete layer after the last one, with the modules that predict a further token."""
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    tensors |= {name.replace("layers.2.", "layers.3."): 2 * tensor for name, tensor in last.items()}
    tensors |= {f"model.layers.3.{name}.weight": torch.ones((8, 16) if "proj" in name else 8) for name in HEAD}


def add_head(tensors: dict[str, torch.Tensor]) -> None:
    """Names of Qwen3-Next and Qwen3.5."""
    tensors |= {"mtp.fc.weight": torch.ones(8, 16), "mtp.layers.0.mlp.up_proj.weight": torch.ones(8, 8)}
    tensors["mtp.norm.weight"] = torch.ones(8)


@pytest.fixture
def source(tiny_model, tmp_path) -> Path:
    return private_copy(tiny_model(), tmp_path / "source")


@pytest.mark.parametrize("add", [add_layer, add_head])
def test_tensors_of_no_layer_are_planned_and_carried_along(source, tmp_path, add) -> None:
    before = set(load_file(source / "model.safetensors"))
    stored = load_file(change_tensors(source, add) / "model.safetensors")
    added = set(stored) - before
    result = runs.compress(source, tmp_path / "out", STAGE)
    assert result.structure.ok
    kinds = [layer for layer in result.report["plan"]["layers"] if layer["reason"] == CARRIED]
    assert sum(layer["count"] for layer in kinds) == len(added)
    size = sum(stored[name].nbytes for name in added)
    assert any(f"{len(added)} tensors ({size / 1e6:.2f} MB" in note for note in result.report["plan"]["notes"])
    packed = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(packed[name], stored[name]) for name in added)
    verified = verify_structure(tmp_path / "out")
    assert verified.ok
    assert any(f"{len(added)} tensors" in note for note in verified.notes)
    reasons = {tensor.name: tensor.reason for tensor in verified.dense}
    assert all(reasons[name] == CARRIED for name in added if stored[name].dim() > 1)


def test_fewer_layers_in_the_config_than_in_the_files(source, tmp_path) -> None:
    result = runs.compress(change_config(source, num_hidden_layers=2), tmp_path / "out", STAGE)
    last = {name for name in load_file(source / "model.safetensors") if "layers.2." in name}
    assert last <= set(load_file(tmp_path / "out/model.safetensors"))
    assert len(result.structure.quantized) == 2 * 7


def test_fewer_layers_in_the_files_than_in_the_config(source, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"\b5 layers.*\b3\b"):
        runs.prepared(change_config(source, num_hidden_layers=5), tmp_path / "out", STAGE)


def test_a_rotation_that_would_break_them_is_refused(source, tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"model\.layers\.3"):
        runs.prepared(change_tensors(source, add_layer), tmp_path / "out", RotateStage(), STAGE)


@pytest.mark.parametrize(
    "family",
    ["glm4_moe", *(pytest.param(family, marks=pytest.mark.full) for family in ("deepseek_v3", "deepseek_v32"))],
)
def test_a_layer_of_multi_token_prediction_behind_a_mixture(tiny_model, tmp_path, family) -> None:
    source = private_copy(tiny_model(family), tmp_path / "source")
    before = load_file(source / "model.safetensors")
    last = {name: 2 * tensor for name, tensor in before.items() if name.startswith("model.layers.2.")}
    further = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in last.items()}
    change_tensors(source, lambda tensors: tensors.update(further))
    result = runs.compress(source, tmp_path / "out", QuantizeStage("rtn", Int(4, 16)))
    packed = load_file(tmp_path / "out/model.safetensors")
    assert result.structure.ok
    assert any("experts" in name for name in further)
    assert all(torch.equal(packed[name], tensor) for name, tensor in further.items())
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(torch.equal(packed[name], before[name]) for name in biases)


def test_a_class_that_transformers_cannot_run_packed_is_noted(tiny_model, tmp_path) -> None:
    context = runs.prepared(tiny_model("falcon"), tmp_path / "out", STAGE)
    assert any("FalconLinear" in note for note in context.notes)
    context = runs.prepared(tiny_model(), tmp_path / "out", STAGE)
    assert not any("class" in note for note in context.notes)
