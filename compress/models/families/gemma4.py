"""Gemma 4: heads by layer, normed values, layers that read keys and values of earlier ones, inputs of each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compress.common.errors import CheckpointError
from compress.models.block_parts import LayerInput, LayerInputs, ParallelMixture
from compress.models.config import (
    MAX_SIZE,
    Config,
    attention,
    block,
    decoder,
    flag,
    gated_mlp,
    layer_types,
    norm,
    num_layers,
    number,
    positive,
    refusal,
    rope_of_kind,
    text,
    windows,
)
from compress.models.families.gemma import AFTER, BEFORE
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mlp import Mixture
from compress.models.norm import Norm
from compress.models.registry import WRAPPERS, Wrapper, register
from compress.models.router import Router
from compress.models.spec import ModelSpec
from compress.models.stacks import Stack

COMMON = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
FULL = "full_attention"
STYLE: dict[str, Any] = {"in_float32": True}
WRAPPERS.register("gemma4")(Wrapper("gemma4_text", ties_head=True))


@register("gemma4_text")
def gemma4_text(config: Config) -> ModelSpec:
    """Describes the text part of a Gemma 4. Raises CheckpointError: attention to later tokens, or layers that share
    keys and values that no layer computes."""
    config = {**COMMON, **config}
    if config.get("use_bidirectional_attention") == "all":
        raise CheckpointError("attention to later tokens (use_bidirectional_attention) is not supported", "Use Gemma 3")
    config |= {"hidden_act": text(config, "hidden_activation", ""), "layer_types": _kinds(config)}
    mixers = _mixers(config)
    spec = decoder(
        config,
        mixers,
        [gated_mlp(config, size=_inner_size(config, mixer.kv_layer is not None)) for mixer in mixers],
        norms=BEFORE,
        after=AFTER,
        style=STYLE,
        layer_input=_layer_input(config),
        parallel_mixture=_parallel_mixture(config) if flag(config, "enable_moe_block") else None,
        scalar="layer_scalar",
    )
    cap = None if config.get("final_logit_softcapping") is None else number(config, "final_logit_softcapping")
    return replace(
        spec,
        embedding_scale=spec.hidden_size**0.5,
        logit_softcap=cap,
        layer_inputs=_layer_inputs(config),
    )


def _norm(config: Config, name: str, size: int | None = None, **options: Any) -> Norm:
    return norm(config, name, size, **STYLE, **options)


def _kinds(config: Config) -> list[str]:
    """Reads the kind of every layer; the last one always sees all tokens. Raises CheckpointError as `windows`."""
    kinds = layer_types(config, 6)
    windows({**config, "sliding_window": positive(config, "sliding_window")}, kinds)
    return [*kinds[:-1], FULL]


def _mixers(config: Config) -> list[Attention]:
    kinds, sources = config["layer_types"], _sources(config)
    ropes = {kind: rope_of_kind(config, ROPES, kind) for kind in set(kinds)}
    mixers = [
        _mixer(_of_layer(config, layer), kind, source, window=window, rope=ropes[kind])
        for layer, (kind, source, window) in enumerate(zip(kinds, sources, windows(config), strict=True))
    ]
    for mixer in mixers:
        read = mixer if mixer.kv_layer is None else mixers[mixer.kv_layer]
        if (mixer.num_kv_heads, mixer.head_dim) != (read.num_kv_heads, read.head_dim):
            raise refusal("num_kv_shared_layers", config["num_kv_shared_layers"], "a number of layers with like heads")
    return mixers


def _of_layer(config: Config, layer: int) -> Config:
    """Puts what `per_layer_config` of transformers 5, or the names of published configs, say of a layer in place."""
    by_layer = block(config, "per_layer_config")
    if by_layer:
        own = block({str(key): value for key, value in by_layer.items()}, str(layer))
        if unknown := sorted({*own} - {"head_dim", "num_key_value_heads"}):
            raise refusal("per_layer_config", unknown, "head_dim and num_key_value_heads only")
        return {**config, **own}
    if config["layer_types"][layer] != FULL:
        return config
    heads = config.get("num_global_key_value_heads") if flag(config, "attention_k_eq_v") else None
    own = {} if heads is None else {"num_key_value_heads": heads}
    return {**config, "head_dim": config.get("global_head_dim", 512), **own}


def _sources(config: Config) -> list[int | None]:
    """Reads the layer whose keys and values each layer reads: the last of its kind that computes some; None is itself.
    Raises CheckpointError: no layer of a kind computes keys and values, or more share them than there are."""
    kinds, key = config["layer_types"], "num_kv_shared_layers"
    shared = positive(config, key, most=len(kinds) - 1) if config.get(key) else 0
    own = kinds[: len(kinds) - shared]
    if shared and set(own) != set(kinds):
        raise refusal(key, shared, "a number that leaves one layer of each kind")
    last = {kind: layer for layer, kind in enumerate(own)}
    return [None] * len(own) + [last[kind] for kind in kinds[len(own) :]]


def _mixer(config: Config, kind: str, source: int | None, **options: Any) -> Attention:
    """Composes the attention of a layer. `source`: earlier layer whose keys and values it reads."""
    bias, head_dim = flag(config, "attention_bias"), positive(config, "head_dim")
    value = _norm(config, "self_attn.v_norm", head_dim, has_weight=False)
    mixer = attention(config, bias=bias, qk_norm=STYLE, scale=1.0, **options)
    if source is not None:
        return replace(mixer, qkv=mixer.qkv[:1], qk_norm=(mixer.qk_norm or ())[:1], kv_layer=source)
    if kind == FULL and flag(config, "attention_k_eq_v"):
        return replace(mixer, qkv=mixer.qkv[:2], value_norm=value, value_is_key=True)
    return replace(mixer, value_norm=value)


def _inner_size(config: Config, shares: bool) -> int:
    double = shares and flag(config, "use_double_wide_mlp")
    return positive(config, "intermediate_size", most=MAX_SIZE // 2) * (2 if double else 1)


def _parallel_mixture(config: Config) -> ParallelMixture:
    """Composes the mixture in parallel with the MLP, whose experts are stored together."""
    count, size = positive(config, "num_experts"), positive(config, "moe_intermediate_size")
    hidden, name = positive(config, "hidden_size"), "experts"
    router = Router(
        Linear("router.proj", count, hidden),
        positive(config, "top_k_experts", most=count),
        score_scale=hidden**-0.5,
        expert_scales="router.per_expert_scale",
    )
    experts = tuple(gated_mlp(config, name=f"{name}.{number}", size=size) for number in range(count))
    stacks = (
        Stack(f"{name}.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
        Stack(f"{name}.down_proj", ("down_proj.weight",)),
    )
    return ParallelMixture(
        Mixture(router, experts, name=name, stacks=stacks),
        mlp_norm=_norm(config, "post_feedforward_layernorm_1"),
        input_norm=_norm(config, "pre_feedforward_layernorm_2"),
        output_norm=_norm(config, "post_feedforward_layernorm_2"),
        router_norm=_norm(config, "router", part="scale"),
    )


def _size(config: Config) -> int:
    """Reads the size of the inputs of each layer; 0 is none."""
    key = "hidden_size_per_layer_input"
    return positive(config, key) if config.get(key) else 0


def _layer_input(config: Config) -> LayerInput | None:
    hidden, size = positive(config, "hidden_size"), _size(config)
    if not size:
        return None
    return LayerInput(
        Linear("per_layer_input_gate", size, hidden),
        Linear("per_layer_projection", hidden, size, split="rows"),
        _norm(config, "post_per_layer_input_norm"),
        text(config, "hidden_act", ""),
    )


def _layer_inputs(config: Config) -> LayerInputs | None:
    size = _size(config)
    if not size:
        return None
    return LayerInputs(
        "model.embed_tokens_per_layer",
        positive(config, "vocab_size_per_layer_input"),
        size,
        Linear("model.per_layer_model_projection", num_layers(config) * size, positive(config, "hidden_size")),
        _norm(config, "model.per_layer_projection_norm", size),
    )
