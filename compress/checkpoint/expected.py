"""What config.json implies about names and shapes, for the families whose layout it determines. Free of torch.

A second opinion for `verify`, on purpose not derived from the model code or from the writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3"})
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
BLOCK_LINEARS = {
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
}
DEFAULT_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")


def is_tabled(config: Mapping[str, Any]) -> bool:
    """Whether this model family's names and shapes are known here and its config states every size."""
    return config.get("model_type") in FAMILIES and all(isinstance(config.get(size), int) for size in SIZES)


def expected_shape(module: str, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """`(O, I)` of a matrix as the config implies it; None when it implies nothing."""
    if not is_tabled(config):
        return None
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    shapes = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "qkv_proj": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
    }
    return shapes.get(module.rpartition(".")[2])


def missing_parameters(config: Mapping[str, Any], stored: Set[str]) -> list[str]:
    """Weights the config implies that are not among the stored ones (`<module>.weight`, packed or dense)."""
    if not is_tabled(config):
        return []
    linears = BLOCK_LINEARS.get(config["model_type"], DEFAULT_LINEARS)
    blocks = range(config["num_hidden_layers"])
    names = [f"model.layers.{block}.{part}.weight" for block in blocks for part in (*linears, *BLOCK_NORMS)]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    return [name for name in names if name not in stored]
