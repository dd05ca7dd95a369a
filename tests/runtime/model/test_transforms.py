"""Transforms of QuIP and SpinQuant: the runtime computes what compressed-tensors does at every token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from safetensors.torch import load_file, save_file
from tiny_models import load_reference, pack_model, put_weights, reference_logits, save_tiny_model
from torch import Tensor

from compress.checkpoint.config import read_config, write_config
from compress.checkpoint.dequantized import open_source, stored_scheme
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int, RotatedInputs
from compress.common.errors import CheckpointError
from compress.doctor.examine import examine
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (1, 40), generator=torch.Generator().manual_seed(3))
DOWN, ATTENTION = "re:.*down_proj$", "re:.*self_attn$"
KEYS = "location", "targets", "inverse"


def scheme(kind: str, *places: tuple[Any, ...], **options: Any) -> dict[str, Any]:
    """A transform as llm-compressor 0.14.0.1 writes it."""
    applied = [{"ignore": ["lm_head"], **dict(zip(KEYS, place, strict=True))} for place in places]
    fixed = {"precision": "torch.float64", "randomize": False, "requires_grad": False, "head_dim": None}
    return {"type": kind, "apply": applied, **fixed, **options}


def quip(kind: str, **options: Any) -> dict[str, Any]:
    return {
        "v": scheme(kind, ("input", ["Linear"], False), ("weight_input", ["Linear"], True), **options),
        "u": scheme(kind, ("weight_output", ["Linear"], False), ("output", ["Linear"], True), **options),
    }


R3 = {"R3": scheme("hadamard", ("q_attn", [ATTENTION], False), ("k_cache", [ATTENTION], False), head_dim=8)}
R4 = {"R4": scheme("hadamard", ("input", [DOWN], False), ("weight_input", [DOWN], True))}
MERGED = {"R2": scheme("hadamard", ("weight_output", ["re:.*v_proj$"], False), ("weight_input", [DOWN], True))}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def online(groups: dict[str, Any]) -> TransformConfig:
    """The part that compressed-tensors attaches to a model whose stored weights are merged already."""
    attached = {
        name: group | {"apply": [place for place in group["apply"] if place["location"] in ("input", "output")]}
        for name, group in groups.items()
    }
    return TransformConfig.model_validate({"config_groups": attached})


def transformed(folder: Path, groups: dict[str, Any], **options: Any) -> Tensor:
    """Writes a packed model with transforms into `folder`; returns its logits by compressed-tensors."""
    dense = save_tiny_model(folder.with_name("dense"), **SIZES | options)
    weights = pack_model(dense, folder, lambda module: Int(4, 16), scale_dtype=torch.float32)
    model = put_weights(load_reference(dense), weights)
    before = set(model.state_dict())
    apply_transform_config(model, online(groups))
    matrices: dict[Tensor, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if name not in before:
            matrices.setdefault(parameter, (name, parameter.data.clone()))
    save_file(load_file(folder / "model.safetensors") | dict(matrices.values()), folder / "model.safetensors")
    config = read_config(folder)
    config["quantization_config"]["transform_config"] = {"config_groups": groups}
    write_config(folder, config)
    return reference_logits(model, TOKENS)


@pytest.mark.parametrize(
    "groups",
    [quip("hadamard"), quip("random-hadamard", head_dim=16), quip("random-matrix", head_dim=16), R4, MERGED | R3 | R4],
    ids=["quip", "blocks", "matrices", "R4", "R2-R4"],
)
def test_transforms_are_applied(groups, tmp_path):
    expected = transformed(tmp_path / "packed", groups)
    found = score(load_model(tmp_path / "packed", dtype="float64"), TOKENS)
    rotates_inputs = "R4" in groups
    opened = PackedCheckpoint.open(tmp_path / "packed")
    assert opened.format == ("compressed-tensors" if rotates_inputs else "dense")
    assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert ("transforms" in examine(tmp_path / "packed").facts) != rotates_inputs


def test_hadamard_matrices_at_inputs_of_integers_are_a_form(tmp_path):
    transformed(tmp_path / "packed", MERGED | R3 | R4)
    packed = PackedCheckpoint.open(tmp_path / "packed")
    assert packed.schemes["model.layers.0.mlp.down_proj"] == RotatedInputs(Int(4, 16), 64)
    assert packed.schemes["model.layers.0.mlp.up_proj"] == Int(4, 16)
    assert not [name for name in packed.dense_names() if "R4" in name]


def test_another_matrix_is_folded(tmp_path):
    transformed(tmp_path / "packed", R4)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("R4_input.weight"))
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, file)
    assert PackedCheckpoint.open(tmp_path / "packed").format == "dense"


def test_codes_without_their_transform_are_not_kept(tmp_path):
    transformed(tmp_path / "packed", {"R4": R4["R4"] | {"type": "random-hadamard"}})
    files, _ = open_source(tmp_path / "packed")
    assert stored_scheme(files, "model.layers.0.mlp.down_proj.weight") is None
    assert stored_scheme(files, "model.layers.0.mlp.up_proj.weight") == Int(4, 16)
    assert stored_scheme(files, "model.norm.weight") is None
    assert stored_scheme(files, "nothing.weight") is None


def test_biases_have_the_output_transform(tmp_path):
    expected = transformed(tmp_path / "packed", quip("hadamard"), attention_bias=True, mlp_bias=True)
    found = score(load_model(tmp_path / "packed", dtype="float64"), TOKENS)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("groups", [MERGED, R3], ids=["merged", "scores"])
def test_transforms_that_change_nothing_leave_the_checkpoint_packed(groups, tmp_path):
    expected = transformed(tmp_path / "packed", groups)
    assert PackedCheckpoint.open(tmp_path / "packed").schemes
    found = score(load_model(tmp_path / "packed", dtype="float64"), TOKENS)
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "groups",
    [
        {"R4": R4["R4"] | {"type": "learned"}},
        {"R4": R4["R4"] | {"randomize": True}},
        {"R4": R4["R4"] | {"head_dim": 48}},
        {"R4": R4["R4"] | {"sign": 3}},
        {"R3": R3["R3"] | {"apply": R3["R3"]["apply"][:1]}},
        {"R3": R3["R3"] | {"type": "random-matrix"}},
        {"R4": scheme("hadamard", ("attn_output", [ATTENTION], False))},
        {"R4": scheme("hadamard", ("output", ["re:.*embed_tokens$"], False))},
        quip("hadamard") | {"w": quip("hadamard")["v"]},
    ],
    ids=["type", "permuted", "no-matrix", "key", "queries", "scores", "place", "embedding", "two"],
)
def test_other_transforms_are_refused(groups, tmp_path):
    transformed(tmp_path / "packed", R4)
    config = read_config(tmp_path / "packed")
    config["quantization_config"]["transform_config"] = {"config_groups": groups}
    write_config(tmp_path / "packed", config)
    with pytest.raises(CheckpointError, match="transform"):
        PackedCheckpoint.open(tmp_path / "packed")
