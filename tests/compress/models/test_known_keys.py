"""Keys of config.json that are read, those that change no numbers, and the refusal of all others."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from folders import change_config
from tiny_configs import SIZES, VARIANTS
from tiny_models import save_tiny_model
from transformers import AutoConfig

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.common.errors import CheckpointError
from compress.doctor.examine import examine
from compress.doctor.findings import Severity
from compress.models.known_keys import HARMLESS, HARMLESS_NAMES, ONLY, READ, check_keys
from compress.models.registry import FAMILIES
from runtime.model.loader import load_model

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2": {"use_mrope": False, "_attn_implementation_autoset": True, "unsloth_fixed": True, "use_cache": True},
    "llama": {"pretraining_tp": 1, "num_labels": 3, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "_x": [1]},
    "deepseek_v3": {"ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "aux_loss_alpha": 0.001},
    "minimax_m2": {"attn_type_list": [1], "qk_norm_type": "per_layer", "use_mtp": True, "layernorm_mlp_beta": 1.0},
    "cohere2": {"order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True, "rotary_pct": 1.0},
    "lfm2": {"block_dim": 8, "block_use_swiglu": True, "block_mlp_init_scale": 1.0, "conv_use_xavier_init": True},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm", "activation_function": None},
    "qwen3_5_text": {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
    "gpt_oss": {"initial_context_length": 4096, "experts_per_token": 4, "rope_scaling": {"rope_type": "yarn"}},
    "phi3": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
    "mistral": {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}},
    "gemma3_text": {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
}
"""Keys of published models that are not fields of transformers' configuration classes."""
UNREAD: tuple[dict[str, Any], ...] = (
    {"attention_gain": 0.5},
    {"rotation_config": {"hadamard_type": "random_hadamard", "block_size": 32}},
    {"moe_layer_freq": 2},
    {"use_rotary_pos_emb": [1]},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "sharpness": 3}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "sharpness": 3}}},
)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_configuration_classes_are_known(family: str) -> None:
    made = AutoConfig.for_model(family, **SIZES | VARIANTS[family])
    check_keys(made.to_dict())
    names = {*made.attribute_map, *(field.name for field in fields(type(made)))}
    assert not {name for name in names if not HARMLESS_NAMES.match(name)} - READ - HARMLESS


@pytest.mark.parametrize("family", PUBLISHED)
def test_harmless_keys_of_published_models_are_accepted(family: str) -> None:
    check_keys({"model_type": family, **PUBLISHED[family]})


def test_lists_do_not_repeat_each_other() -> None:
    assert not READ & HARMLESS
    assert not (READ | HARMLESS) & ONLY.keys()
    assert not {name for name in READ | HARMLESS if HARMLESS_NAMES.match(name)}


@pytest.mark.parametrize("unread", UNREAD, ids=lambda unread: next(iter(unread)))
def test_a_key_that_nothing_reads_is_refused_alike(unread: dict[str, Any], tmp_path: Path) -> None:
    folder = change_config(save_tiny_model(tmp_path / "model"), **unread)
    for use in (PackedCheckpoint.open, load_model, verify_structure):
        with pytest.raises(CheckpointError, match=r"moe_layer|sharpness|gain|rotation_config|rotary") as refused:
            use(folder)
        assert refused.value.remedy
    findings = examine(folder).findings
    assert [finding.kind for finding in findings if finding.severity is Severity.ERROR] == ["unreadable"]
