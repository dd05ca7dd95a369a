"""Kimi Linear as it is published: names of fields, and of tensors, that transformers writes otherwise."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_configs import SIZES, VARIANTS
from tiny_models import load_reference, reference_logits, save_tiny_model
from transformers import AutoConfig

from compress.models.families.kimi_linear import kimi_linear
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (2, 40), generator=torch.Generator().manual_seed(3))
PUBLISHED = {
    **SIZES,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4, 5],
        "head_dim": 24,
        "num_heads": 2,
        "short_conv_kernel_size": 3,
    },
    "first_k_dense_replace": 2,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_expert_group": 4,
    "num_shared_experts": 2,
    "topk_group": 2,
    "moe_renormalize": False,
    "model_max_length": 512,
}


@pytest.mark.parametrize("left_out", ["", *PUBLISHED["linear_attn_config"], "linear_attn_config"])
def test_a_published_config_means_what_transformers_reads(left_out: str) -> None:
    parts = {name: value for name, value in PUBLISHED["linear_attn_config"].items() if name != left_out}
    config = {**PUBLISHED, "linear_attn_config": parts}
    config = {name: value for name, value in config.items() if name != left_out}
    assert kimi_linear(config) == kimi_linear(AutoConfig.for_model("kimi_linear", **config).to_dict())


def test_mlps_are_read_by_their_published_name_and_by_that_of_transformers(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "kimi_linear", **VARIANTS["kimi_linear"])
    expected = score(load_model(folder, dtype="float64"), TOKENS)
    tensors = load_file(folder / "model.safetensors")
    written = [name for name in tensors if ".0.block_sparse_moe." in name]
    assert len(written) == 3
    named = {name.replace("0.block_sparse_moe.", "0.mlp."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(score(load_model(folder, dtype="float64"), TOKENS), expected)
    torch.testing.assert_close(reference_logits(load_reference(folder), TOKENS), expected, rtol=0, atol=1e-10)
