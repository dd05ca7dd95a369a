"""Gemma 2 and 3: norms around both parts of a layer, whose weights files store with 1 added.

Files do not say the divisor of the scores; it follows from the number of layers, as in llama.cpp.
"""

from __future__ import annotations

from compress.checkpoint.gguf.architectures.base import (
    ARCHITECTURES,
    ATTENTION,
    HEAD_NORMS,
    MLP,
    Architecture,
    Config,
    Source,
)

AROUND = {
    **ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **MLP,
    "post_ffw_norm": "post_feedforward_layernorm",
}
ACTIVATION = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
LOCAL_BASE = 10000.0


def _divisor(source: Source) -> int:
    heads, hidden = source.count("attention.head_count"), source.count("embedding_length")
    if source.count("block_count") == LAYERS_OF_27B[source.name]:
        return hidden // heads
    return source.count("attention.key_length", hidden // heads)


def _gemma2(source: Source) -> Config:
    return {
        "attn_logit_softcapping": source.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": source.number("final_logit_softcapping", 30.0),
        "sliding_window": source.count("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _divisor(source),
        "rope_parameters": {"rope_type": "default", "rope_theta": source.number("rope.freq_base", 10000.0)},
    }


def _gemma3(source: Source) -> Config:
    full: Config = {"rope_type": "default", "rope_theta": source.number("rope.freq_base", 1e6)}
    if source.get("rope.scaling.type", "none") == "linear":
        full |= {"rope_type": "linear", "factor": source.number("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": source.number("rope.freq_base_swa", LOCAL_BASE)}
    layers = range(source.count("block_count"))
    return {
        "sliding_window": source.count("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in layers],
        "query_pre_attn_scalar": _divisor(source),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


for each in (
    Architecture("gemma2", ("gemma2",), AROUND, fixed=ACTIVATION, read=_gemma2, norm_offset=1.0),
    Architecture("gemma3", ("gemma3_text",), {**AROUND, **HEAD_NORMS}, fixed=ACTIVATION, read=_gemma3, norm_offset=1.0),
):
    ARCHITECTURES.register()(each)
