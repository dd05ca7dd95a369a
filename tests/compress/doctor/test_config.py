"""Contradictions between config.json and tensors, each with its own finding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from folders import change_config, change_tensors
from torch import Tensor

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.errors import CheckpointError

Find = Callable[..., set[tuple[str, str]]]
LAYER = "model.layers.5."


def test_a_missing_tensor(dense: Path, kinds: Find) -> None:
    change_tensors(dense, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    assert kinds(dense) == {("error", "missing-tensors")}


def test_an_unexpected_tensor(dense: Path, kinds: Find) -> None:
    change_tensors(dense, lambda tensors: tensors.update({"model.layers.3.mlp.side_proj.weight": torch.ones(256, 256)}))
    assert kinds(dense) == {("warning", "unexpected-tensors")}


@pytest.mark.full
def test_weights_of_optimum_quanto(dense: Path, kinds: Find) -> None:
    """They are named as such: no tensor is missing that another config.json would have."""

    def rename(tensors: dict[str, Tensor]) -> None:
        weight = tensors.pop("model.layers.0.mlp.up_proj.weight")
        name = "model.layers.0.mlp.up_proj.weight"
        tensors |= {f"{name}._data": weight.to(torch.int8), f"{name}._scale": weight[:, :1].clone()}

    change_tensors(dense, rename)
    (dense / "quanto_qmap.json").write_text("{}")
    found = kinds(dense)
    assert ("error", "unreadable") in found
    assert not {("error", "missing-tensors"), ("warning", "unexpected-tensors")} & found
    with pytest.raises(CheckpointError, match="'quanto'"):
        PackedCheckpoint.open(dense)


def test_missing_layers(dense: Path, kinds: Find) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(LAYER)]:
            del tensors[name]

    change_tensors(dense, drop)
    assert kinds(dense) == {("error", "missing-tensors"), ("error", "layer-count")}


def test_missing_layers_of_an_unknown_family(dense: Path, kinds: Find) -> None:
    change_config(dense, model_type="of_nobody", num_hidden_layers=7)
    assert kinds(dense) == {("error", "layer-count")}


def test_more_layers_than_announced(dense: Path, kinds: Find) -> None:
    change_config(dense, num_hidden_layers=5)
    assert kinds(dense) == {("warning", "layer-count")}


def test_other_shapes(dense: Path, kinds: Find) -> None:
    change_config(dense, intermediate_size=700)
    assert kinds(dense) == {("error", "shape")}


def test_other_shapes_of_a_packed_model(packed: Path, kinds: Find) -> None:
    change_config(packed, intermediate_size=700)
    assert kinds(packed) == {("error", "shape")}


def test_another_vocabulary_size(dense: Path, kinds: Find) -> None:
    change_config(dense, vocab_size=8000)
    assert kinds(dense) == {("error", "vocabulary-size"), ("error", "shape")}


def test_a_head_that_config_json_ties(dense: Path, kinds: Find) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    change_tensors(dense, add)
    assert kinds(dense) == {("warning", "tied-head")}


def test_another_dtype(dense: Path, kinds: Find) -> None:
    change_config(dense, dtype="float16")
    assert kinds(dense) == {("warning", "dtype")}


def test_no_model_type(dense: Path, kinds: Find) -> None:
    change_config(dense, model_type=None)
    assert kinds(dense) == {("error", "config")}


def test_an_unknown_container(packed: Path, kinds: Find) -> None:
    change_config(packed, quantization_config={"quant_method": "of_nobody"})
    assert kinds(packed) == {("error", "unreadable")}
