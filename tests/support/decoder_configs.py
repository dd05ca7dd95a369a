"""Decoders of any shape, without a checkpoint."""

from collections.abc import Sequence
from dataclasses import replace

from runtime.core.model_config import DecoderConfig, parse_config


def decoder_config(
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_layers: int,
    windows: tuple[int | None, ...] | None = None,
    qk_norm: bool = False,
    **sizes: object,
) -> DecoderConfig:
    """A small bfloat16 decoder of Llama's kind; `sizes` are those of config.json."""
    config = {
        "model_type": "qwen3" if qk_norm else "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        **sizes,
    }
    model = replace(parse_config(config), dtype="bfloat16")
    if windows is None:
        return model
    blocks = zip(model.spec.blocks, windows, strict=True)
    windowed = tuple(replace(block, mixer=replace(block.mixer, window=window)) for block, window in blocks)
    return replace(model, spec=replace(model.spec, blocks=windowed))


def with_heads(config: DecoderConfig, heads: Sequence[tuple[int, int, int, int | None]]) -> DecoderConfig:
    """A decoder with other heads in each layer: query heads, key-value heads, their dimension, and the earlier layer
    whose keys and values it reads, if any."""
    names = "num_heads", "num_kv_heads", "head_dim", "kv_layer"
    blocks = tuple(
        replace(block, mixer=replace(block.mixer, **dict(zip(names, values, strict=True))))
        for block, values in zip(config.spec.blocks, heads, strict=True)
    )
    return replace(config, spec=replace(config.spec, blocks=blocks))
