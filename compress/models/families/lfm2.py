"""LFM2 (arXiv:2511.23404): attention in some layers, a gated convolution over few tokens in the others; and LFM3, with
windows, gates on heads and norms on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from compress.models.config import (
    Config,
    attention,
    block,
    by_kind,
    decoder,
    flag,
    gated_mlp,
    mixture,
    norm,
    num_layers,
    number,
    positive,
    refusal,
    rope,
    rope_of_kind,
)
from compress.models.cuts import Cuts, stacked
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.mixer import ConvolvedMixer, Mixer
from compress.models.mlp import MLP, Mixture
from compress.models.registry import register
from compress.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ShortConv(ConvolvedMixer):
    """A causal convolution over few tokens between two gates: `output(c * conv(b * x))` (arXiv:2511.23404). `qkv`: one
    projection, of b, c and x in this order."""

    qkv: tuple[Linear, ...]
    output: Linear
    kernel: int
    name: str = "conv"
    conv_part: ClassVar[str] = "conv"

    @property
    def conv_size(self) -> int:
        return self.qkv[0].out_features // 3

    @property
    def has_conv_bias(self) -> bool:
        return self.qkv[0].bias

    def cut(self, cuts: Cuts) -> Self:
        """Cuts all by channel."""
        own = cuts.share(self.conv_size, self.output)
        self.cut_conv(cuts, own)
        qkv = (cuts.rows(self.qkv[0], *stacked(*3 * ((own, self.conv_size),))),)
        return replace(self, qkv=qkv, output=cuts.columns(self.output, own))


NAME, PARTS = "feed_forward", ("w1", "w3", "w2")
NORMS, FINAL = ("operator_norm", "ffn_norm"), "model.embedding_norm"
FULL = "full_attention"
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
LFM3 = {
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 7680},
    **{"sliding_window": 256, "conv_L_cache": 7, "tie_word_embeddings": True, "hidden_act": "silu"},
}


@register("lfm2")
def lfm2(config: Config) -> ModelSpec:
    """Describes a dense LFM2, whose `intermediate_size` may be rounded up from two thirds of it."""
    config = {**config, "intermediate_size": config.get("block_ff_dim", config.get("intermediate_size", 12288))}
    return _lfm2(config, gated_mlp(config, name=NAME, size=_inner_size(config), parts=PARTS))


@register("lfm2_moe")
def lfm2_moe(config: Config) -> ModelSpec:
    """Describes a mixture of LFM2, whose first layers have an MLP."""
    config = {
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        **config,
    }
    experts = mixture(
        config,
        name=NAME,
        size=positive(config, "moe_intermediate_size"),
        parts=PARTS,
        activation="sigmoid",
        bias=f"{NAME}.expert_bias" if flag(config, "use_expert_bias", True) else "",
        normalizes=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
        added_sum=1e-6,
    )
    mlp, dense = gated_mlp(config, name=NAME, parts=PARTS), number(config, "num_dense_layers", 2)
    return _lfm2(config, [mlp if layer < dense else experts for layer in range(num_layers(config))])


@register("lfm3", converted=True)
def lfm3(config: Config) -> ModelSpec:
    """Describes a dense LFM3. Raises CheckpointError: a rotary embedding of all layers, where each kind has its own."""
    if scaling := block(config, "rope_scaling"):
        raise refusal("rope_scaling", scaling, "null if rope_parameters are given by kind of layer")
    config = {**LFM3, **config, "rms_norm_eps": number(config, "norm_eps", 1e-5)}
    after = ("post_operator_norm", "post_ffn_norm") if flag(config, "use_sandwich_norm", True) else ()
    mixers: dict[str, Mixer] = {kind: _gated_attention(config, kind) for kind in ROPES}
    mixers["conv"] = _conv(config)
    kinds = config.get("layer_types")
    if kinds is None:
        places = range(num_layers(config))
        kinds = [FULL if i % 4 == 2 else "conv" if i % 4 or i == 0 else "sliding_attention" for i in places]
    mlp = gated_mlp(config, name=NAME, parts=PARTS)
    return decoder(config, by_kind(config, kinds, mixers), mlp, norms=NORMS, after=after, final=FINAL)


def _gated_attention(config: Config, kind: str) -> Attention:
    bias, heads = flag(config, "attention_bias"), positive(config, "num_attention_heads")
    gate = Linear("self_attn.g_proj", heads, positive(config, "hidden_size"))
    return attention(
        config,
        bias=bias,
        qk_norm=True,
        rope=rope_of_kind(config, ROPES, kind),
        window=None if kind == FULL else positive(config, "sliding_window"),
        head_gate=gate if flag(config, "use_attention_gate", True) else None,
    )


def _inner_size(config: Config) -> int:
    size = positive(config, "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    size, multiple = (
        int(number(config, "block_ffn_dim_multiplier", 1.0) * size),
        positive(config, "block_multiple_of", 256),
    )
    return multiple * -(-size // multiple)


def _lfm2(config: Config, mlps: MLP | Mixture | Sequence[MLP | Mixture]) -> ModelSpec:
    config = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        **config,
        "tie_word_embeddings": config.get("tie_embedding", config.get("tie_word_embeddings", True)),
        "hidden_act": "silu",
    }
    mixers: dict[str, Mixer] = {"conv": _conv(config), FULL: _attention(config)}
    kinds, chosen = config.get("layer_types"), config.get("full_attn_idxs")
    if not isinstance(chosen, list | None):
        raise refusal("full_attn_idxs", chosen, "a list of layers")
    if kinds is None:
        kinds = [FULL if chosen is None or layer in chosen else "conv" for layer in range(num_layers(config))]
    return decoder(config, by_kind(config, kinds, mixers), mlps, norms=NORMS, final=FINAL)


def _attention(config: Config) -> Attention:
    mixer = attention(config, rope=rope(config, theta=1e6))
    query, key = (norm(config, f"self_attn.{name}_layernorm", mixer.head_dim) for name in "qk")
    return replace(mixer, qk_norm=(query, key), output=replace(mixer.output, name="self_attn.out_proj"))


def _conv(config: Config) -> ShortConv:
    bias, hidden = flag(config, "conv_bias"), positive(config, "hidden_size")
    inputs = Linear("conv.in_proj", 3 * hidden, hidden, bias)
    output = Linear("conv.out_proj", hidden, hidden, bias, split="rows")
    return ShortConv((inputs,), output, positive(config, "conv_L_cache", 3))
