"""Phi-3 and Phi-4: one matrix for queries, keys and values, one for gate and up, and LongRoPE."""

from __future__ import annotations

from compress.checkpoint.gguf.architectures.base import ARCHITECTURES, Architecture, Config, Source, shortest

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def _read(source: Source) -> Config:
    length = source.count("rope.scaling.original_context_length", source.count("context_length"))
    rope: Config = {"rope_type": "default", "rope_theta": source.number("rope.freq_base", 10000.0)}
    found = {key: source.vector(name) for key, name in FACTORS.items()}
    factors = {key: list(map(shortest, values)) for key, values in found.items() if values is not None}
    if len(factors) == len(FACTORS):
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": length, **factors}
    window = source.count("attention.sliding_window") if source.get("attention.sliding_window") else None
    return {"original_max_position_embeddings": length, "sliding_window": window, "rope_parameters": rope}


ARCHITECTURES.register()(Architecture("phi3", ("phi3",), NAMES, fixed={"hidden_act": "silu"}, read=_read))
