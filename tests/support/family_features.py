"""Options of a tiny model with every feature that the configuration class of its family has."""

from typing import Any

from transformers import CONFIG_MAPPING

FEATURES: dict[str, object] = {
    "attention_bias": True,
    "attention_out_bias": True,
    "final_logit_softcapping": 3.0,
    "head_dim": 24,
    "mlp_bias": True,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_local_experts": 8,
    "query_pre_attn_scalar": 30,
    "sliding_window": 9,
    "use_bias": True,
    "use_qk_norm": True,
    "use_sliding_window": True,
}
"""Values that tiny models show, by the field that turns a feature on."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}


def all_features(family: str) -> dict[str, Any]:
    """Turns on what the configuration class of a family has: biases, windows by layer, partial rotation, experts."""
    fields = CONFIG_MAPPING[family](bos_token_id=None, eos_token_id=None).to_dict()
    found = {name: value for name, value in FEATURES.items() if name in fields}
    rotated = (fields.get("rope_parameters") or {}).get("partial_rotary_factor")
    found |= {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": rotated}} if rotated else {}
    return found | (MIXED if {"layer_types", "sliding_window"} <= fields.keys() else {})
