"""Tiny models as other engines take them: sizes that fill their kernels' tiles, and the fields that published files of
a family have in addition to those of its configuration class."""

import shutil
from pathlib import Path
from typing import Any

import torch
from tiny_configs import GEMMA4_EXPERTS, VARIANTS
from tiny_models import save_tiny_model
from transformers import CONFIG_MAPPING

from compress.checkpoint.config import read_config
from compress.checkpoint.formats.readers import WITH_EXPERTS
from compress.common.cli import demo_model_path
from compress.models.registry import FAMILIES

VOCAB_SIZE = read_config(demo_model_path())["vocab_size"]
SIZES: dict[str, Any] = {
    "block_multiple_of": 128,
    "conv_L_cache": 4,
    "conv_kernel": 4,
    "global_head_dim": 64,
    "head_dim": 64,
    "hidden_size": 256,
    "hidden_size_per_layer_input": 128,
    "index_head_dim": 128,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "kv_lora_rank": 128,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "mamba_d_conv": 4,
    "mamba_d_ssm": 512,
    "mamba_d_state": 128,
    "mamba_dt_rank": 128,
    "mamba_head_dim": 64,
    "moe_intermediate_size": 128,
    "moe_latent_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
    "ssm_state_size": 128,
    "state_size": 128,
    "v_head_dim": 128,
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
"""Multiples of the widest group of weights where a matrix has one."""
LEFT_OUT = {
    "attention_bias",
    "attention_out_bias",
    "lm_head_bias",
    "max_window_layers",
    "mamba_proj_bias",
    "mlp_bias",
    "original_max_position_embeddings",
    "projectors_bias",
    "rope_parameters",
    "use_bias",
    "use_sliding_window",
}
"""Features of tiny models of our own tests that published models of few families have."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "deepseek_v32": {"topk_method": "noaux_tc"},
    "glm4_moe": {"head_dim": 64},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    "glm_moe_dsa": {
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "topk_method": "noaux_tc",
    },
    "lfm2": {"block_dim": 256, "conv_dim": 256},
    "mamba2": {"intermediate_size": 512},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""Fields of published config.json files that transformers' class does not have."""


GEMMA4 = f"gemma4_text{WITH_EXPERTS}"
MODEL_TYPES = *FAMILIES, GEMMA4
"""Names in the table of what was measured."""


def loadable_options(family: str) -> dict[str, Any]:
    """Fields of config.json of a family's tiny model."""
    config = CONFIG_MAPPING[family]()
    known = config.to_dict().keys() | config.attribute_map.keys()
    given = {name: value for name, value in VARIANTS[family].items() if name in known - LEFT_OUT}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in given:
        del sizes["head_dim"]  # that of the rotated part, which a class derives
    return {"num_key_value_heads": 2, **given, **sizes, **PUBLISHED.get(family, {})}


def save_loadable_model(folder: Path, name: str) -> Path:
    """Writes the dense model of one of `MODEL_TYPES`, in bfloat16, with the tokenizer of the demo model."""
    family, more = ("gemma4_text", GEMMA4_EXPERTS | {"moe_intermediate_size": 128}) if name == GEMMA4 else (name, {})
    save_tiny_model(folder, family, torch.bfloat16, **loadable_options(family) | more)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model_path() / name, folder / name)
    return folder
