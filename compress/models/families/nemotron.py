"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: layers of one part each, which is Mamba-2 (arXiv:2405.21060), attention
without positions, an MLP or a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from compress.models.block import Block
from compress.models.config import (
    MAX_LAYERS,
    SIGMOID_ROUTER,
    Config,
    attention,
    flag,
    grouped_mixture,
    norm,
    number,
    plain_mlp,
    positive,
    refusal,
    text,
)
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.mamba2 import Mamba2
from compress.models.mixers.mamba_config import mamba2
from compress.models.mlp import MLP, Mixture
from compress.models.registry import register
from compress.models.spec import ModelSpec, TensorNames

NAME = "mixer"
SYMBOLS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""Kinds of layers by their symbols in `hybrid_override_pattern`."""
KINDS = SYMBOLS | {"mamba": "linear_attention", "attention": "full_attention"}
"""Older checkpoints have these names."""
DEFAULTS = {
    "hidden_size": 4096,
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
}
OLDER_KEYS = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
MAMBA_KEYS = {
    "heads": "mamba_num_heads",
    "groups": "n_groups",
    "head_dim": "mamba_head_dim",
    "state": "ssm_state_size",
    "kernel": "conv_kernel",
    "expand": "expand",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "activation": "mamba_hidden_act",
}


@register("nemotron_h", stored_as="backbone")
def nemotron_h(config: Config) -> ModelSpec:
    config = {**DEFAULTS, **config, "rms_norm_eps": number(config, "layer_norm_epsilon", 1e-5)}
    kinds, names = _kinds(config), TensorNames(embedding="model.embeddings", final_norm="model.norm_f")
    blocks = {kind: _block(config, kind) for kind in set(kinds)}
    return ModelSpec(
        positive(config, "hidden_size"),
        positive(config, "vocab_size"),
        tuple(blocks[kind] for kind in kinds),
        norm(config, names.final_norm, in_float32=True),
        names=names,
    )


def _kinds(config: Config) -> list[str]:
    """Reads the kind of every layer. Raises CheckpointError for none, for too many and for unknown ones."""
    pattern = config.get("hybrid_override_pattern")
    listed = config.get("layers_block_type", config.get("layer_types"))
    key, kinds = ("layers_block_type", listed) if pattern is None or listed else ("hybrid_override_pattern", pattern)
    kinds = list(SYMBOLS.values()) if kinds is None else kinds
    if not isinstance(kinds, list | str) or not 0 < len(kinds) <= MAX_LAYERS:
        raise refusal(key, kinds, "a list of kinds of layers")
    found = [str(KINDS.get(str(kind), kind)) for kind in kinds]
    if not set(found) <= PARTS.keys():
        raise refusal(key, kinds, f"a list of {', '.join(PARTS)}")
    return found


def _block(config: Config, kind: str) -> Block:
    part, before = PARTS[kind](config), norm(config, "norm", in_float32=True)
    if isinstance(part, MLP | Mixture):
        return Block(None, None, before, part)
    return Block(before, part, None, None)


def _mamba2(config: Config) -> Mamba2:
    config = {**config, **{key: config[older] for older, key in OLDER_KEYS.items() if older in config}}
    inner = positive(config, "mamba_num_heads", 128) * positive(config, "mamba_head_dim")
    # transformers reads no `time_step_limit` here.
    limits = number(config, "mamba_dt_min", number(config, "time_step_min", 0.001)), math.inf
    return mamba2(config, inner, NAME, MAMBA_KEYS, step_limits=limits)


def _mlp(config: Config, name: str = NAME, size: int | None = None) -> MLP:
    bias, activation = flag(config, "mlp_bias"), text(config, "mlp_hidden_act", "relu2")
    read = {**config, "hidden_act": activation}
    return plain_mlp(read, "up_proj", "down_proj", activation, bias=bias, name=name, size=size)


def _mixture(config: Config) -> Mixture:
    """Composes a mixture of experts without gates, which may read and write fewer channels than the others."""
    hidden, inner = positive(config, "hidden_size"), positive(config, "moe_intermediate_size")
    narrow = hidden if config.get("moe_latent_size") is None else positive(config, "moe_latent_size")
    expert: Callable[..., MLP] = partial(_mlp, {**config, "mlp_bias": False, "hidden_size": narrow}, size=inner)
    shared = _mlp(config, f"{NAME}.shared_experts", positive(config, "moe_shared_expert_intermediate_size", 7688))
    router = {**SIGMOID_ROUTER, "bias": f"{NAME}.gate.e_score_correction_bias"}
    found = grouped_mixture({**config, "n_shared_experts": 1}, name=NAME, expert=expert, shared=shared, **router)
    if config.get("moe_latent_size") is None:
        return found
    bias = flag(config, "mlp_bias")
    before = Linear(f"{NAME}.fc1_latent_proj", narrow, hidden, bias)
    behind = Linear(f"{NAME}.fc2_latent_proj", hidden, narrow, bias, split="rows")
    return replace(found, around=(before, behind))


PARTS: dict[str, Callable[[Config], Attention | Mamba2 | MLP | Mixture]] = {
    "linear_attention": _mamba2,
    "full_attention": partial(attention, name=NAME, rope=None),
    "mlp": _mlp,
    "moe": _mixture,
}
"""Composers of the part of a layer, by its kind."""
