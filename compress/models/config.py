"""Readers of config.json, and the parts that pre-norm decoders are composed of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.common.errors import CheckpointError
from compress.models.spec import Attention, Block, GatedMLP, Linear, ModelSpec, RMSNorm, Rope

Config = Mapping[str, Any]
"""A parsed config.json, of transformers 4 or 5."""


def positive(config: Config, key: str, default: int | None = None) -> int:
    """Reads a size. Raises CheckpointError unless it is a positive integer."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {key}={value!r}, not a positive integer", "Check config.json")
    return value


def flag(config: Config, key: str) -> bool:
    return bool(config.get(key, False))


def rope(config: Config) -> Rope:
    """Reads the rotary embedding, from `rope_parameters` of transformers 5 or `rope_scaling` of transformers 4.

    As in transformers, `rope_scaling` wins where both are there, and so does an `original_max_position_embeddings`
    outside of them.

    Raises:
        CheckpointError: a base or a share of channels that is no number.
    """
    block = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = block.pop("rope_type", block.pop("type", "default"))
    theta = block.pop("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float):
        raise CheckpointError(f"rotary embedding {kind!r} lacks rope_theta", "Check config.json")
    outer = config.get("partial_rotary_factor", config.get("rope_partial_factor"))
    partial = block.pop("partial_rotary_factor", outer)
    partial = 1.0 if partial is None else partial
    if not isinstance(partial, int | float):
        raise CheckpointError(f"partial_rotary_factor is {partial!r}, not a number", "Check config.json")
    length = "original_max_position_embeddings"
    block[length] = config.get(length) or block.get(length) or config.get("max_position_embeddings", 2048)
    return Rope(kind, float(theta), block, float(partial))


def windows(config: Config, first: int = 0) -> tuple[int | None, ...]:
    """Reads the attention window of every layer; None attends to all tokens.

    Args:
        first: layer from which windows hold where `layer_types` does not say.

    Raises:
        CheckpointError: layers that are neither of full nor of sliding attention, or not one kind for each.
    """
    num_layers = positive(config, "num_hidden_layers")
    if config.get("sliding_window") is None:
        return (None,) * num_layers
    window = positive(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise CheckpointError(f"layer_types {sorted(unknown) or len(kinds)} is not supported", "Check config.json")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def switched_windows(config: Config) -> tuple[int | None, ...]:
    """Windows that hold only with `use_sliding_window`, from layer `max_window_layers` on."""
    if not flag(config, "use_sliding_window"):
        return (None,) * positive(config, "num_hidden_layers")
    return windows(config, config.get("max_window_layers", 28))


def norm(config: Config, name: str, size: int | None = None) -> RMSNorm:
    return RMSNorm(name, size or positive(config, "hidden_size"), float(config.get("rms_norm_eps", 1e-6)))


def attention(
    config: Config,
    *,
    window: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    fused: bool = False,
) -> Attention:
    """Composes grouped-query attention named as in Llama.

    Args:
        qk_norm: RMSNorm over each query and key head.
        fused: queries, keys and values are stored as one matrix.

    Raises:
        CheckpointError: query heads that do not divide among the key-value heads.
    """
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key-value heads", "Check config.json")
    head_dim = positive(config, "head_dim", hidden // heads)
    parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    parts = {"qkv_proj": sum(parts.values())} if fused else parts
    return Attention(
        heads,
        kv_heads,
        head_dim,
        tuple(Linear(f"self_attn.{name}", count * head_dim, hidden, qkv_bias) for name, count in parts.items()),
        Linear("self_attn.o_proj", hidden, heads * head_dim, output_bias, split="rows"),
        rope(config),
        (norm(config, "self_attn.q_norm", head_dim), norm(config, "self_attn.k_norm", head_dim)) if qk_norm else None,
        window,
    )


def gated_mlp(config: Config, *, bias: bool = False, fused: bool = False) -> GatedMLP:
    """Composes a gated MLP named as in Llama.

    Args:
        fused: gate and up are stored as one matrix.
    """
    hidden, inner = positive(config, "hidden_size"), positive(config, "intermediate_size")
    parts = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
    return GatedMLP(
        tuple(Linear(f"mlp.{name}", size, hidden, bias) for name, size in parts.items()),
        Linear("mlp.down_proj", hidden, inner, bias, split="rows"),
        str(config.get("hidden_act", "silu")),
    )


def decoder(config: Config, mixers: Sequence[Attention], mlp: GatedMLP) -> ModelSpec:
    """Composes a pre-norm decoder named as Llama, with one block per mixer."""
    first, second = norm(config, "input_layernorm"), norm(config, "post_attention_layernorm")
    return ModelSpec(
        positive(config, "hidden_size"),
        positive(config, "vocab_size"),
        tuple(Block(first, mixer, second, mlp) for mixer in mixers),
        norm(config, "model.norm"),
        flag(config, "tie_word_embeddings"),
    )
