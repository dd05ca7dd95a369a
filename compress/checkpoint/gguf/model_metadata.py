"""Metadata of a model from config.json; the inverse of what `architectures` read, which must give the same model."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from compress.checkpoint.gguf.architectures.base import ARCHITECTURES, KEYS, Architecture, Source
from compress.checkpoint.gguf.architectures.llama3_rope import frequency_factors
from compress.common.errors import CheckpointError, ToolkitError
from compress.models.registry import find_family

Config = Mapping[str, Any]
REMEDY = "Export to another format: compressed-tensors or dense"
OPTIONAL = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
"""Numbers that are written where config.json has them."""


def architecture_of(config: Config) -> Architecture:
    """Returns the architecture of a model. Raises CheckpointError for a model type that has none here."""
    known = {model_type: each for each in ARCHITECTURES.values() for model_type in each.model_types}
    if (model_type := str(config.get("model_type"))) not in known:
        raise CheckpointError(f"models of type {model_type!r} are not written as GGUF, only {', '.join(known)}", REMEDY)
    return known[model_type]


def model_metadata(config: Config, names: Container[str]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Returns the metadata of a model, and the values of small tensors that belong to them.

    Args:
        names: of the tensors of the file.

    Raises:
        CheckpointError: a model that the metadata cannot say, or not exactly.
    """
    architecture, rope = architecture_of(config), _rope(config)
    _describe(config)  # refuses what is missing or of another type
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    channels = config.get("head_dim") or hidden // heads
    defaults: dict[str, Any] = {"num_key_value_heads": heads, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    filled = {**defaults, **config}
    optional = {key: config[own] for own, key in OPTIONAL.items() if config.get(own) is not None}
    own: dict[str, Any] = {key: filled[name] for key, name in KEYS.items()} | optional
    own["attention.layer_norm_rms_epsilon"] = float(own["attention.layer_norm_rms_epsilon"])
    own |= {"attention.key_length": channels, "attention.value_length": channels, "vocab_size": config["vocab_size"]}
    partial = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
    own["rope.dimension_count"] = int(channels * partial)
    theta: Any = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    own |= {"rope.freq_base": float(theta), **_stretch(rope)}
    vectors = _vectors(rope, own["rope.dimension_count"])
    metadata = {f"{architecture.name}.{key}": value for key, value in own.items()}
    _check_same(config, architecture, metadata, vectors, names)
    return {"general.architecture": architecture.name, **metadata}, vectors


def _rope(config: Config) -> dict[str, Any]:
    rope: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return dict(rope.get("full_attention", rope))


def _kind(rope: Config) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _stretch(rope: Config) -> dict[str, Any]:
    kind = _kind(rope)
    found: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        found = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind in ("yarn", "longrope") and "original_max_position_embeddings" in rope:
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _vectors(rope: Config, channels: int) -> dict[str, list[float]]:
    if _kind(rope) == "llama3":
        return {"rope_freqs.weight": frequency_factors({"rope_theta": 10000.0, **rope}, channels)}
    if _kind(rope) == "longrope":
        return {f"rope_factors_{name}.weight": list(rope[f"{name}_factor"]) for name in ("long", "short")}
    return {}


def _check_same(
    config: Config,
    architecture: Architecture,
    metadata: Mapping[str, Any],
    vectors: Mapping[str, list[float]],
    names: Container[str],
) -> None:
    """Raises CheckpointError unless reading gives the same description of the model."""
    source = Source(architecture.name, metadata, vectors.get, names)
    try:
        found = architecture.config(source) | {
            key: config[key] for key in ("vocab_size", "tie_word_embeddings") if key in config
        }
        same = _describe(found) == _describe(config)
    except ToolkitError as error:
        raise CheckpointError(f"GGUF cannot say this config.json: {error.problem}", REMEDY) from error
    if not same:
        raise CheckpointError(
            f"config.json has a setting that metadata of {architecture.name!r} cannot say: readers would compute "
            "another model",
            REMEDY,
        )


def _describe(config: Config) -> Any:
    describe = find_family(config.get("model_type"))
    if describe is None:
        raise CheckpointError(f"model type {config.get('model_type')!r} is not known", REMEDY)
    return describe(dict(config))
