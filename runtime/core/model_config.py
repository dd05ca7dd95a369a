"""What a decoder looks like, read from config.json. No torch: refusals come before weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint.config import dtype_name
from compress.checkpoint.kv_cache import KVCacheRecord, KVCacheScheme, measured_kv_caches, stored_kv_cache
from compress.common.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Family:
    """How one model family differs from the others.

    Attributes:
        qkv_bias: biases on q, k and v whatever config.json says; None asks `attention_bias`, for the output too.
        qk_norm: an RMSNorm over each query and key head before the rotary embedding.
        window: whether `sliding_window` counts: `never`, `always`, or `switched` on by `use_sliding_window`.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False
    window: str = "never"


FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="always"),
    "qwen2": Family(qkv_bias=True, window="switched"),
    "qwen3": Family(qk_norm=True, window="switched"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its kind, its base and the numbers that kind needs."""

    type: str
    theta: float
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The facts of one decoder-only model.

    Attributes:
        qkv_bias, output_bias, mlp_bias: biases that the weights must bring; others are used where they exist.
        windows: per layer, how many tokens (itself included) a token attends to; None is all.
        context_length: longest sequence the model was made for.
        dtype: the checkpoint's, by name.
        eos_token_ids: tokens that end a sequence.
        kv_cache: form of keys and values that the checkpoint records for serving.
        kv_measured: what forms were measured to cost when the checkpoint was made.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    context_length: int
    dtype: str
    eos_token_ids: frozenset[int]
    kv_cache: KVCacheScheme | None = None
    kv_measured: KVCacheRecord | None = None


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderConfig:
    """The facts in a config.json (of transformers 4 or 5) and a generation_config.json.

    Raises:
        CheckpointError: a model family, rotary embedding, activation or attention this runtime does not compute, or a
            config without the numbers that define the shapes.
        SchemeError: a recorded KV cache format that does not exist.
    """
    family = _family(config)
    _check_supported(config)
    heads = _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    hidden = _positive(config, "hidden_size")
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key-value heads", "Check config.json")
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        model_type=config["model_type"],
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_positive(config, "head_dim", hidden // heads),
        vocab_size=_positive(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        windows=_windows(config, family),
        context_length=_positive(config, "max_position_embeddings", 2048),
        dtype=dtype_name(config),
        eos_token_ids=_eos_token_ids(config, generation or {}),
        kv_cache=stored_kv_cache(config),
        kv_measured=measured_kv_caches(config),
    )


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, empty when there is none. Raises CheckpointError when it is not JSON."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", "Download this file again or remove it") from error
    return content if isinstance(content, dict) else {}


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"the runtime cannot serve model_type {model_type!r}; it knows {', '.join(FAMILIES)}",
            "Serve it with transformers or vLLM: compressed-tensors checkpoints load there unchanged",
        )
    return FAMILIES[model_type]


def _check_supported(config: Mapping[str, Any]) -> None:
    """Refuses what would otherwise be computed wrongly."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"activation {activation!r} is not supported, only silu", "Serve it with transformers")
    for key in ("partial_rotary_factor", "rope_partial_factor"):
        if _rope_block(config).get(key, config.get(key)) not in (None, 1, 1.0):
            raise CheckpointError(f"{key} other than 1 is not supported", "Serve it with transformers")


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {key}={value!r}, not a positive integer", "Check config.json")
    return value


def _rope_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or `rope_scaling` of transformers 4."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    block = _rope_block(config)
    kind = block.pop("rope_type", block.pop("type", "default"))
    theta = block.pop("rope_theta", config.get("rope_theta", 10000.0))
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"rotary embedding {kind!r} is not supported, only {', '.join(ROPE_TYPES)}", "Serve it with transformers"
        )
    needed = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    missing = [key for key in needed.get(kind, ()) if not isinstance(block.get(key), int | float)]
    if missing or not isinstance(theta, int | float):
        raise CheckpointError(
            f"rotary embedding {kind!r} lacks {', '.join(missing) or 'rope_theta'}", "Check config.json"
        )
    original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings", 2048)
    return RopeConfig(kind, float(theta), {"original_max_position_embeddings": original} | block)


def _windows(config: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    num_layers = _positive(config, "num_hidden_layers")
    counts = family.window == "always" or (family.window == "switched" and config.get("use_sliding_window"))
    if not counts or config.get("sliding_window") is None:
        return (None,) * num_layers
    window = _positive(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28) if family.window == "switched" else 0
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise CheckpointError(f"layer_types {sorted(unknown) or len(kinds)} is not supported", "Check config.json")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json wins: it lists the end of a turn beside the end of a text."""
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
