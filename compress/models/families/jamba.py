"""Jamba (arXiv:2403.19887): Mamba-1 in most layers, attention without positions in the others, and mixtures in some."""

from __future__ import annotations

import math
from dataclasses import replace

from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    integer,
    mixture,
    norm,
    num_layers,
    positive,
    refusal,
    text,
)
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.mamba1 import Mamba1
from compress.models.mixers.mamba_config import mixer_kinds
from compress.models.mlp import MLP, Mixture
from compress.models.registry import register
from compress.models.spec import ModelSpec

DEFAULTS = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_experts_per_tok": 2}
NAME = "feed_forward"


@register("jamba")
def jamba(config: Config) -> ModelSpec:
    """Describes a Jamba."""
    config = {**DEFAULTS, **config}
    config = config if "num_local_experts" in config else {"num_experts": 16, **config}
    mixers: dict[str, Attention | Mamba1] = {
        "linear_attention": _mamba1(config),
        "full_attention": attention(config, rope=None),
    }
    kinds = ["attention" if is_one else "mamba" for is_one in _periodic(config, "attn_layer", 8, 4)]
    chosen = [mixers[kind] for kind in mixer_kinds({**config, "layer_types": kinds})]
    spec = decoder(config, chosen, _mlps(config), mlp_norm=norm(config, "pre_ff_layernorm"))
    final = norm(config, "model.final_layernorm")
    return replace(spec, final_norm=final, names=replace(spec.names, final_norm=final.name))


def _periodic(config: Config, part: str, period: int, offset: int) -> list[bool]:
    """Reads which layers are of a kind. Raises CheckpointError for an offset that no layer has."""
    period = positive(config, f"{part}_period", period)
    offset = integer(config, f"{part}_offset", offset)
    if not 0 <= offset < period:
        raise refusal(f"{part}_offset", offset, f"0 to {period - 1}")
    return [layer % period == offset for layer in range(num_layers(config))]


def _mlps(config: Config) -> list[MLP | Mixture]:
    """Lists the MLP or mixture of each layer."""
    dense = gated_mlp(config, name=NAME)
    count = positive(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    if count == 1:
        return [dense] * num_layers(config)
    experts = mixture(config, name=NAME, scores="router", normalizes=False)
    return [experts if is_one else dense for is_one in _periodic(config, "expert_layer", 2, 1)]


def _mamba1(config: Config) -> Mamba1:
    """Composes a layer of Mamba-1 with norms of steps, inputs and outputs of the state."""
    name, hidden = "mamba", positive(config, "hidden_size")
    size, state = hidden * positive(config, "mamba_expand", 2), positive(config, "mamba_d_state", 16)
    auto = config.get("mamba_dt_rank", "auto") == "auto"
    rank = math.ceil(hidden / 16) if auto else positive(config, "mamba_dt_rank")
    bias, norms = flag(config, "mamba_proj_bias"), {"dt": rank, "b": state, "c": state}
    return Mamba1(
        size,
        state,
        (Linear(f"{name}.in_proj", 2 * size, hidden, bias),),
        Linear(f"{name}.x_proj", rank + 2 * state, size, is_inner=True),
        Linear(f"{name}.dt_proj", size, rank, bias=True, is_inner=True),
        Linear(f"{name}.out_proj", hidden, size, bias, split="rows"),
        tuple(norm(config, f"{name}.{part}_layernorm", channels) for part, channels in norms.items()),
        positive(config, "mamba_d_conv", 4),
        flag(config, "mamba_conv_bias", True),
        text(config, "hidden_act", "silu"),
        name,
    )
