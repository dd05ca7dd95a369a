"""Llama, and Mistral, whose files say `llama`: queries and keys with the channels of a pair side by side."""

from __future__ import annotations

from compress.checkpoint.gguf.architectures.base import BLOCK, Architecture, Config, Source, scaled_rope

PAIRS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def _read(source: Source) -> Config:
    if source.get("attention.sliding_window"):
        window = source.count("attention.sliding_window")
        return {**scaled_rope(source), "model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {**scaled_rope(source), **{key: name in source.names for key, name in biases.items()}}


ARCHITECTURES = (
    Architecture("llama", ("llama", "mistral"), BLOCK, fixed={"hidden_act": "silu"}, read=_read, interleaved=PAIRS),
)
