"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP, and layers without a window have no positions."""

from __future__ import annotations

from compress.models.config import Config, attention, decoder, gated_mlp, layer_types, positive, rope, windows
from compress.models.registry import register
from compress.models.spec import ModelSpec


@register("exaone4")
def exaone4(config: Config) -> ModelSpec:
    """Describes an EXAONE 4. Without any window all layers have positions."""
    config = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "num_key_value_heads": 32, **config}
    has_windows, rotary = config["sliding_window"] is not None, rope(config)
    kinds = layer_types(config, _period(config)) if has_windows else None
    mixers = [
        attention(config, qk_norm=True, window=window, rope=None if has_windows and window is None else rotary)
        for window in windows(config, kinds)
    ]
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    return decoder(config, mixers, gated_mlp(config), norms=(None, None), after=after)


def _period(config: Config) -> int:
    """Reads which layers have no window: the last of every pattern, as `LLLG` or its length."""
    pattern = config.get("sliding_window_pattern")
    return len(pattern) if pattern and isinstance(pattern, str) else positive(config, "sliding_window_pattern", 4)
