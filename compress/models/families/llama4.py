"""Llama 4, text: mixtures whose router weighs what experts read, chunks of tokens, and layers without positions."""

from __future__ import annotations

from typing import Any

from compress.common.errors import CheckpointError
from compress.models.block_parts import PositionScale
from compress.models.config import (
    Config,
    attention,
    decoder,
    flag,
    gated_mlp,
    mixture,
    norm,
    num_layers,
    number,
    positive,
    refusal,
    rope,
)
from compress.models.mixers.attention import Attention
from compress.models.mlp import MLP, Mixture
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.spec import ModelSpec
from compress.models.stacks import Stack

NAME = "feed_forward"
DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "rms_norm_eps": 1e-5,
    "attention_chunk_size": 8192,
}
STACKS = (
    Stack(f"{NAME}.experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight"), transposed=True, splits_packed=True),
    Stack(f"{NAME}.experts.down_proj", ("down_proj.weight",), transposed=True, splits_packed=True),
)


@register("llama4_text")
def llama4_text(config: Config) -> ModelSpec:
    """Describes the text part of a Llama 4. Raises CheckpointError: kinds of layers, or lists of them, that do not fit
    the number of layers."""
    config = {**DEFAULTS, **config}
    return decoder(config, _mixers(config), _mlps(config))


def _mixers(config: Config) -> list[Attention]:
    count = num_layers(config)
    interval = positive(config, "no_rope_layer_interval", 4)
    rotated = _listed(config, "no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    kinds = _listed(config, "layer_types") or ["chunked_attention" if each else "full_attention" for each in rotated]
    if len(rotated) < count or len(kinds) != count or any(kind not in KINDS for kind in kinds):
        raise CheckpointError(f"layer_types {kinds!r} do not fit {count} layers", "Check config.json")
    return [
        _mixer(config, bool(has_rope), kind == "chunked_attention")
        for has_rope, kind in zip(rotated, kinds, strict=False)
    ]


KINDS = "chunked_attention", "full_attention"


def _listed(config: Config, key: str) -> list[Any] | None:
    """Reads a list. Raises CheckpointError for anything else but null."""
    found = config.get(key)
    if not isinstance(found, list | None):
        raise refusal(key, found, "a list")
    return found


def _mixer(config: Config, has_rope: bool, is_chunked: bool) -> Attention:
    """Composes the attention of a layer: queries and keys are normalized where they are rotated, else queries grow."""
    bias, size = flag(config, "attention_bias"), positive(config, "head_dim")
    normed = norm(config, "self_attn.qk_norm", size, has_weight=False)
    growth = PositionScale(number(config, "attn_scale", 0.1), positive(config, "floor_scale", 8192), first=1)
    # Published files have a number here.
    grows = bool(config.get("attn_temperature_tuning", True)) and not has_rope
    return attention(
        config,
        bias=bias,
        rope=rope(config, theta=500000.0, interleaved=True) if has_rope else None,
        qk_norm=(normed, normed) if has_rope and flag(config, "use_qk_norm", True) else False,
        norms_rotated=True,
        position_scale=growth if grows else None,
        chunk=positive(config, "attention_chunk_size") if is_chunked else None,
    )


def _mlps(config: Config) -> list[MLP | Mixture]:
    count, step = num_layers(config), positive(config, "interleave_moe_layer_step", 1)
    mixtures = _listed(config, "moe_layers")
    mixtures = list(range(step - 1, count, step)) if mixtures is None else mixtures
    experts = mixture(
        config,
        name=NAME,
        scores="router",
        stacks=STACKS,
        shared=gated_mlp(config, name=f"{NAME}.shared_expert"),
        activation="sigmoid",
        normalizes=False,
        weighs_inputs=True,
    )
    dense = gated_mlp(config, name=NAME, size=positive(config, "intermediate_size_mlp", 16384))
    return [experts if layer in mixtures else dense for layer in range(count)]


WRAPPERS.register("llama4")(Wrapper("llama4_text"))
