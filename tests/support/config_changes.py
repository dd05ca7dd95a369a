"""Changes of one field each of a configuration class of transformers, found by the types of its fields."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN

Change = dict[str, Any]
"""Fields of a config.json and their other values."""

COSMETIC = ("output_", "use_cache", "initializer_range", "rescale_prenorm_residual")
"""Prefixes of names of fields that logits do not depend on, in addition to those that every configuration has: with the
last one, transformers scales weights of Mamba-2 at load that are meant to be scaled when a training begins."""
COSMETIC_ENDS = ("_token_id", "_dropout", "dropout", "_pdrop", "_coef", "_range")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "relu2", "tanh", "sigmoid")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: tuple[Change, ...] = (
    {"rope_theta": 300.0},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 0.25},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32},
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 0.7},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
    YARN | {"truncate": False},
    LLAMA3 | {"original_max_position_embeddings": 32},
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.5] * 12,
        "long_factor": [2.5] * 12,
    },
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 300,
        "short_factor": [1.5, 2] * 4,
        "long_factor": [2.5] * 8,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
)
"""Other values of parameters of a rotary embedding."""


def field_names(family: str) -> list[str]:
    """Fields of a family's configuration class that logits may depend on."""
    common = {field.name for field in fields(PreTrainedConfig)}
    own = [field.name for field in fields(_config_class(family))]
    return [
        name
        for name in own
        if name not in common and not name.startswith(COSMETIC) and not name.endswith(COSMETIC_ENDS)
    ]


def changes(family: str, options: Change) -> Iterator[Change]:
    """Yields changes of one field each of the configuration that `options` make; many make no model."""
    config = AutoConfig.for_model(family, **options).to_dict()
    for name in field_names(family):
        if name == "rope_parameters":
            yield from _rope_changes(config[name] or {})
        else:
            yield from ({name: value} for value in _other_values(config.get(name)) if value != config.get(name))


def _other_values(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value + 1, value * 2, value // 2, 1, 0
    if isinstance(value, float):
        return value * 3 + 0.01, value / 2, None
    if isinstance(value, str):
        return ACTIVATIONS if value in ACT2FN else ()
    if isinstance(value, list):
        return (value[::-1], *([each] * len(value) for each in dict.fromkeys(value)), None)
    return (True, 1, 3, 12, 0.5, 2.5, "gelu") if value is None else ()


def null_fields(family: str) -> list[str]:
    """Fields that are null by default: a class derives them from others."""
    return [field.name for field in fields(_config_class(family)) if field.default is None]


def missing_fields(family: str, config: Change) -> Iterator[Change]:
    """Yields a config without each of its fields, with null in place of it, and under each other name of it."""
    for name in field_names(family):
        yield {key: value for key, value in config.items() if key != name}
        yield config | {name: None}
    for other, name in _config_class(family).attribute_map.items():
        yield {other if key == name else key: value for key, value in config.items()}


def legacy_changes(family: str) -> Iterator[Change]:
    """Yields values of keys that are no longer fields, but that a class still reads."""
    for name in re.findall(r'kwargs\.(?:get|pop)\(\s*"(\w+)"', inspect.getsource(_config_class(family))):
        yield from ({name: value} for value in _other_values(None))
    for rope in ROPES:
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        yield {"rope_scaling": scaling or None, "rope_theta": 300.0}
        yield {"rope_scaling": scaling or None}
        yield {"partial_rotary_factor": 0.5, "rope_scaling": scaling or None}


def _config_class(family: str) -> type[PreTrainedConfig]:
    return type(AutoConfig.for_model(family))


def _rope_changes(parameters: Change) -> Iterator[Change]:
    """Yields other rotary embeddings, for each kind of layer where there are kinds."""
    kinds = [kind for kind, value in parameters.items() if isinstance(value, dict)]
    for rope in ROPES:
        if kinds:
            yield from ({"rope_parameters": parameters | {kind: parameters[kind] | rope}} for kind in kinds)
            yield {"rope_parameters": {kind: parameters[kind] | rope for kind in kinds}}
        yield {"rope_parameters": parameters | rope}
