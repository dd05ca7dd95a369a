"""SmolLM3: Llama in which some layers have no positions (arXiv:2501.18795)."""

from __future__ import annotations

from compress.common.errors import CheckpointError
from compress.models.config import Config, attention, decoder, flag, gated_mlp, num_layers, positive, rope, windows
from compress.models.registry import register
from compress.models.spec import ModelSpec

TIED = True
"""`tie_word_embeddings` of a config.json without it, as in transformers."""


@register("smollm3")
def smollm3(config: Config) -> ModelSpec:
    config = {"tie_word_embeddings": TIED, "num_key_value_heads": 4, **config}
    bias, rotary = flag(config, "attention_bias"), rope(config, theta=2_000_000.0)
    rotated = rotated_layers(config)
    switched = flag(config, "use_sliding_window")
    kinds = ["sliding_attention" if switched and not rotates else "full_attention" for rotates in rotated]
    seen = windows(config, config.get("layer_types") or kinds)
    mixers = [
        attention(config, bias=bias, window=window, rope=rotary if rotates else None)
        for window, rotates in zip(seen, rotated, strict=True)
    ]
    return decoder(config, mixers, gated_mlp(config, bias=flag(config, "mlp_bias")))


def rotated_layers(config: Config) -> list[bool]:
    """Reads which layers have positions. Raises CheckpointError: `no_rope_layers` that is not one number for each
    layer."""
    count = num_layers(config)
    interval = positive(config, "no_rope_layer_interval", 4)
    listed = config.get("no_rope_layers")
    listed = [int((layer + 1) % interval != 0) for layer in range(count)] if listed is None else listed
    if not isinstance(listed, list) or len(listed) != count:
        raise CheckpointError(f"no_rope_layers is {listed!r}, not a list of {count} numbers", "Check config.json")
    return [bool(each) for each in listed]
