"""Fields of config.json for a tiny model of every mixture that no family describes."""

from tiny_configs import EXPERTS, LATENT, MIXED

GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
OTHER_MIXTURES: dict[str, dict[str, object]] = {
    "aria_text": {"moe_num_experts": 8, "moe_topk": 3, "moe_num_shared_experts": 1},
    "axk1": {**EXPERTS, **LATENT, **GROUPS, "first_k_dense_replace": 1},
    "cohere2_moe": {**EXPERTS, **MIXED, "num_shared_experts": 1, "head_dim": 24, "logit_scale": 2.0},
    "dots1": {**EXPERTS, **GROUPS, "first_k_dense_replace": 1},
    "exaone_moe": {
        **{**EXPERTS, **MIXED, "num_shared_experts": 1, "n_group": 4, "topk_group": 2},
        **{"first_k_dense_replace": 1, "head_dim": 24},
    },
    "flex_olmo": EXPERTS,
    "granitemoe_swa": {**EXPERTS, **MIXED, "num_local_experts": 8},
    "granitemoeshared": {**EXPERTS, "num_local_experts": 8, "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3, "head_dim": 24},
    "hy_v3": {**EXPERTS, "num_local_experts": 8, "first_k_dense_replace": 1, "head_dim": 24},
    "kolibri1": EXPERTS,
    "laguna": {**EXPERTS, "head_dim": 24},
    "mellum": {**EXPERTS, **MIXED, "head_dim": 24},
    "mimo_v2_flash": {
        **{**EXPERTS, **MIXED, "n_routed_experts": 8, "num_attention_heads": 8},
        **{"head_dim": 24, "v_head_dim": 16},
    },
    "sarvam_moe": {**EXPERTS, **GROUPS, "first_k_dense_replace": 1, "head_dim": 24},
    "solar_open": {**EXPERTS, **GROUPS, "head_dim": 24},
}
HYBRID = {
    **{"linear_key_head_dim": 12, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}
REFUSED: dict[str, dict[str, object]] = {
    "bailing_hybrid": {**EXPERTS, **LATENT},
    "longcat_flash": {
        **{**EXPERTS, **LATENT, "n_routed_experts": 8, "zero_expert_num": 2, "moe_topk": 3, "num_layers": 2},
        **{"expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "head_dim": 8},
    },
    "olmo_hybrid": HYBRID,
}
"""Models that are neither compressed nor served."""
STACKED_MIXTURES = {"aria_text", "granitemoe_swa", "granitemoeshared"}
"""Those whose files hold one tensor for all experts."""
