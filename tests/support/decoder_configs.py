"""Decoders of any shape, without a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from runtime.core.model_config import DecoderConfig, parse_config


def decoder_config(heads: int, kv_heads: int, head_dim: int, num_layers: int, **fields: object) -> DecoderConfig:
    """A small bfloat16 decoder of Llama's family; `fields` of the result may be others."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
    }
    return replace(parse_config(config), dtype="bfloat16", **fields)
