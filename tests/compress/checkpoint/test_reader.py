"""One way in for dense and packed checkpoints."""

import json

import pytest
import torch

from compress.checkpoint.config import is_tied, read_config, write_config
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.errors import CheckpointError

UP = "model.layers.1.mlp.up_proj"


def test_dense(dense_folder):
    dense = PackedCheckpoint.open(dense_folder)
    assert (dense.format, dense.modules, dense.dtype, dense.tied) == ("dense", [], torch.bfloat16, True)
    assert dense.scheme(UP) is None
    assert torch.equal(dense.weight(UP), dense.tensor(f"{UP}.weight"))
    assert dense.shape(UP) == (256, 128)
    assert UP in dense.dense_linears()
    assert "model.embed_tokens" not in dense.dense_linears()
    with pytest.raises(CheckpointError, match=r"no tensor 'nothing.weight' among its \d+ tensors"):
        dense.weight("nothing")


def test_packed(dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "p", lambda module: Int(3, 32, False) if "mlp" in module else None)
    packed = PackedCheckpoint.open(tmp_path / "p")
    assert packed.format == "compressed-tensors"
    assert packed.modules == sorted(weights)
    assert packed.scheme(UP) == Int(3, 32, False)
    assert packed.shape(UP) == (256, 128)
    weight = packed.weight(UP)
    assert isinstance(weight, IntegerWeight)
    assert torch.equal(weight.qweight, weights[UP].qweight)
    assert torch.equal(weight.zero_points, weights[UP].zero_points)
    assert weight.scales.dtype == torch.bfloat16
    assert isinstance(packed.weight("model.layers.1.self_attn.q_proj"), torch.Tensor)
    assert "model.layers.1.self_attn.q_proj.bias" in packed.dense_names()
    assert packed.weight_bytes(UP) == 256 * 128 * 3 // 8 + 256 * 4 * 2 + 256 * 4 * 3 // 8


def test_tied_when_the_config_does_not_say():
    assert is_tied({}, ["model.embed_tokens.weight"])
    assert not is_tied({}, ["lm_head.weight_packed"])
    assert is_tied({"tie_word_embeddings": True}, ["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"type": "float"}, "4-bit"),
        ({"strategy": "block"}, "by block"),
        ({"num_bits": 9}, "bits=9"),
    ],
)
def test_schemes_out_of_reach(dense_folder, pack, tmp_path, change, complaint):
    pack(dense_folder, tmp_path / "p", lambda module: Int(4, 64))
    config = read_config(tmp_path / "p")
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(change)
    write_config(tmp_path / "p", config)
    with pytest.raises(CheckpointError, match=complaint):
        PackedCheckpoint.open(tmp_path / "p")


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors"])
def test_config_blocks_that_say_too_little(dense_folder, pack, tmp_path, format):
    pack(dense_folder, tmp_path / "p", lambda module: Int(4, 64), format=format)
    config = read_config(tmp_path / "p")
    block = {"quant_method": format, "config_groups": [1]}
    (tmp_path / "p" / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    with pytest.raises(CheckpointError, match="quantization_config"):
        PackedCheckpoint.open(tmp_path / "p")
