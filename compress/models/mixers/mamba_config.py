"""Readers of config.json for models with Mamba-2 (arXiv:2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.models.config import Config, flag, norm, positive, refusal, text
from compress.models.linear import Linear
from compress.models.mixers.mamba2 import Mamba2

KEYS = {
    "heads": "mamba_n_heads",
    "groups": "mamba_n_groups",
    "head_dim": "mamba_d_head",
    "state": "mamba_d_state",
    "kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "bias": "mamba_proj_bias",
    "conv_bias": "mamba_conv_bias",
    "activation": "hidden_act",
}
"""Fields of config.json that most families have."""


def mamba2(
    config: Config, inner: int | None = None, name: str = "mamba", keys: Mapping[str, str] = KEYS, **options: Any
) -> Mamba2:
    """Composes a layer of Mamba-2. Raises CheckpointError: heads that do not take up all channels, or do not divide
    among the groups. `inner`: channels of all heads; None for a multiple of the residual stream."""
    hidden, heads = positive(config, "hidden_size"), positive(config, keys["heads"], 128)
    inner = hidden * positive(config, keys["expand"], 2) if inner is None else inner
    groups = positive(config, keys["groups"], 1)
    size = inner // heads if config.get(keys["head_dim"], "auto") == "auto" else positive(config, keys["head_dim"])
    if heads * size != inner:
        raise refusal(keys["heads"], heads, f"{inner} channels divided by {keys['head_dim']}={size}")
    if heads % groups:
        raise refusal(keys["groups"], groups, f"a divisor of {keys['heads']}={heads}")
    bias, state = flag(config, keys["bias"]), positive(config, keys["state"], 256)
    mixer = Mamba2(
        heads,
        groups,
        size,
        state,
        (Linear(f"{name}.in_proj", 2 * inner + 2 * groups * state + heads, hidden, bias),),
        Linear(f"{name}.out_proj", hidden, inner, bias, split="rows"),
        norm(config, f"{name}.norm", inner, in_float32=True),
        positive(config, keys["kernel"], 4),
        has_conv_bias=flag(config, keys["conv_bias"], True),
        step_limits=step_limits(config),
        activation=text(config, keys["activation"], "silu"),
        name=name,
    )
    return replace(mixer, **options)


def step_limits(config: Config) -> tuple[float, float]:
    """Reads the least and the largest step. Raises CheckpointError unless they are numbers of 0 or more."""
    limits = config.get("time_step_limit", [0.0, math.inf])
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise refusal("time_step_limit", limits, "two numbers")
    least, most = (_limit(limit) for limit in limits)
    return least, most


def _limit(value: object) -> float:
    # transformers writes infinity as an object, because JSON has none.
    if value == {"__float__": "Infinity"}:
        return math.inf
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise refusal("time_step_limit", value, "a number of 0 or more")
    return float(value)
