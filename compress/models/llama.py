"""The families whose blocks are known. A new family is a new entry here and no code."""

from __future__ import annotations

from compress.models.spec import Architecture, ResidualStream, SmoothingMapping

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

# Pre-norm, grouped-query attention and a gated MLP, with norms that multiply by their weight (not by 1 + weight).
# Qwen3 norms queries and keys per head after the projections; scaling the projections' input leaves their output as it
# was, so its edges are the same.
_LLAMA_EDGES = (
    SmoothingMapping("input_layernorm", _QKV, "self_attn"),
    SmoothingMapping("self_attn.v_proj", ("self_attn.o_proj",), "self_attn.o_proj"),
    SmoothingMapping("post_attention_layernorm", _GATE_UP, "mlp"),
    SmoothingMapping("mlp.up_proj", ("mlp.down_proj",), "mlp.down_proj"),
)

_LLAMA_STREAM = ResidualStream(
    readers=(("input_layernorm", _QKV), ("post_attention_layernorm", _GATE_UP)),
    writers=("self_attn.o_proj", "mlp.down_proj"),
    values=("self_attn.v_proj", "self_attn.o_proj"),
)

ARCHITECTURES = (
    Architecture(
        ("llama", "mistral", "qwen2", "qwen3"), siblings=(_QKV, _GATE_UP), edges=_LLAMA_EDGES, stream=_LLAMA_STREAM
    ),
)
