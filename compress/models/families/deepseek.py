"""DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437), Kimi-K2 among them, and V3.2 (arXiv:2512.02556): latent
attention, and mixtures whose first layers are dense."""

from __future__ import annotations

from compress.models.config import (
    SIGMOID_ROUTER,
    Config,
    decoder,
    dense_first,
    flag,
    gated_mlp,
    grouped_mixture,
    mlps_by_kind,
    num_layers,
    positive,
    refusal,
    rope,
)
from compress.models.mixers.indexer import lightning_indexer
from compress.models.mixers.latent import latent_attention
from compress.models.mtp import with_mtp_layer
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec

HEADS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V3 = {
    **HEADS,
    "num_key_value_heads": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
INDEXER = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
GROUPED = "group_limited_greedy"


@register("deepseek_v2")
def deepseek_v2(config: Config) -> ModelSpec:
    """Describes a DeepSeek-V2, whose experts may be chosen from the groups with the best ones."""
    config = {**HEADS, "n_shared_experts": 2, "moe_intermediate_size": 1407, **config}
    config = config if "num_experts" in config else {"n_routed_experts": 64, **config}
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", GROUPED):
        raise refusal("topk_method", method, f"greedy or {GROUPED}")
    bias, size = flag(config, "mlp_bias"), positive(config, "moe_intermediate_size")
    shared_size = size * positive(config, "n_shared_experts")
    groups = {"num_ranked": 1} if method == GROUPED else {"num_groups": 1, "num_chosen_groups": 1}
    experts = grouped_mixture(
        config,
        shared=gated_mlp(config, name="mlp.shared_experts", size=shared_size, bias=bias),
        normalizes=False,
        in_float32=True,
        **groups,
    )
    mixer = latent_attention(config, rope(config, interleaved=True))
    return decoder(config, [mixer] * num_layers(config), dense_first(config, experts, 0, bias=bias))


@register("deepseek_v3", aliases=("kimi_k2",))
def deepseek_v3(config: Config) -> ModelSpec:
    config = {**V3, **config}
    config = config if "num_local_experts" in config else {"n_routed_experts": 256, **config}
    mixer = latent_attention(config, rope(config, interleaved=flag(config, "rope_interleave", True)))
    experts = grouped_mixture(config, **SIGMOID_ROUTER)
    return with_mtp_layer(decoder(config, [mixer] * num_layers(config), dense_first(config, experts, 3)))


@register("deepseek_v32")
def deepseek_v32(config: Config) -> ModelSpec:
    """Describes a DeepSeek-V3.2, in which an indexer of every layer chooses the tokens that it sees."""
    config = {**V3, "n_routed_experts": 256, **INDEXER, **config}
    mixer = latent_attention(config, rope(config, interleaved=True), indexer=lightning_indexer(config))
    experts = grouped_mixture(config, **SIGMOID_ROUTER)
    layers = mlps_by_kind(config, experts, dense_first(config, experts, 3))
    return with_mtp_layer(decoder(config, [mixer] * num_layers(config), layers))


# The head is the embedding unless config.json says otherwise, as in the class of transformers.
# When transformers saves one, it renames the layers of the text model together with those of the vision tower.
WRAPPERS.register("kimi_k25")(
    Wrapper("deepseek_v3", {"kimi_k2": "deepseek_v3"}, ties_head=True, renamed=(r"^model\.blocks\.", "model.layers."))
)
