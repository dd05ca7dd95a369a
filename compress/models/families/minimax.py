"""Mixtures of MiniMax: MiniMax-01 (arXiv:2501.08313), most layers of which have lightning attention, and M2, with norms
over all query heads and all key heads at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from compress.models.block import Block
from compress.models.block_parts import Residual
from compress.models.config import (
    Config,
    attention,
    by_kind,
    decoder,
    mixture,
    norm,
    num_layers,
    number,
    positive,
    rope,
    text,
    wide_norms,
)
from compress.models.cuts import Cuts, scaled, size
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.mixer import Mixer, StateField
from compress.models.norm import Norm, NormShare
from compress.models.registry import register
from compress.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LightningAttention(Mixer):
    """Linear attention with a fixed decay for each head (arXiv:2401.04658), as in MiniMax-01 (arXiv:2501.08313).

    Attributes:
        qkv: one projection, of query, key and value of each head in turn, and one of the output gate.
        norm: over all heads, before their gate, whose sigmoid multiplies them.
        decays: logarithm of the factor on the state before each token, one for each head; tables that files hold of
            them follow from the number of the layer, and are not read.
    """

    num_heads: int
    head_dim: int
    qkv: tuple[Linear, Linear]
    output: Linear
    norm: Norm
    decays: tuple[float, ...]
    activation: str = "silu"
    name: str = "self_attn"

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (self.norm,)

    @property
    def state_fields(self) -> dict[str, StateField]:
        """A matrix for each head."""
        return {"matrix": StateField((self.num_heads, self.head_dim, self.head_dim), is_exact=True)}

    def cut(self, cuts: Cuts) -> Self:
        """Cuts all by head."""
        heads, (inputs, gate) = cuts.share(self.num_heads, self.output, self.head_dim), self.qkv
        own = scaled(heads, self.head_dim)
        return replace(
            self,
            num_heads=size(heads),
            qkv=(cuts.rows(inputs, scaled(own, 3)), cuts.rows(gate, own)),
            output=cuts.columns(self.output, own),
            norm=cuts.norm(self.norm, own, NormShare(self.norm.size)),
            decays=self.decays[heads],
        )


NAME, PARTS = "block_sparse_moe", ("w1", "w3", "w2")
LIGHTNING_EPS = 1e-6
"""Eps of the norms of lightning attention, whatever that of the other norms is."""


@register("minimax")
def minimax(config: Config) -> ModelSpec:
    """Describes a MiniMax-01, whose norms replace the residual stream."""
    config = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        **config,
    }
    config = config if "num_experts" in config else {"num_local_experts": 8, **config}
    layers, kinds = num_layers(config), config.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if layer % 2 else "full_attention" for layer in range(layers)]
    window = None if config.get("sliding_window") is None else positive(config, "sliding_window")
    softmax = attention(config, window=window, rope=rope(config, theta=1_000_000.0))
    found = by_kind(config, kinds, {"linear_attention": None, "full_attention": softmax})
    mixers = [mixer or _lightning(config, layer) for layer, mixer in enumerate(found)]
    spec = decoder(config, mixers, mixture(config, name=NAME, parts=PARTS))
    return replace(spec, blocks=tuple(_with_residual(config, block) for block in spec.blocks))


def _with_residual(config: Config, block: Block) -> Block:
    """Adds the factors of the residual stream, which depend on the mixer."""
    parts = "full_attn" if isinstance(block.mixer, Attention) else "linear_attn", "mlp"
    kept, scales = (tuple(number(config, f"{part}_{name}_factor", 1.0) for part in parts) for name in ("alpha", "beta"))
    return replace(block, residual=Residual((scales[0], scales[1]), (kept[0], kept[1])))


def _lightning(config: Config, layer: int) -> LightningAttention:
    """Composes a layer of lightning attention; states decay slower in later layers (arXiv:2501.08313, section 2.2)."""
    name, hidden, heads = "self_attn", positive(config, "hidden_size"), positive(config, "num_attention_heads")
    head_dim = positive(config, "head_dim", hidden // heads)
    size, factor = heads * head_dim, 1 - layer / (num_layers(config) - 1 + 1e-5) + 1e-5
    return LightningAttention(
        heads,
        head_dim,
        (Linear(f"{name}.qkv_proj", 3 * size, hidden), Linear(f"{name}.output_gate", size, hidden)),
        Linear(f"{name}.out_proj", hidden, size, split="rows"),
        norm({"rms_norm_eps": LIGHTNING_EPS}, f"{name}.norm", size),
        tuple(-factor * 2 ** (-8 * (head + 1) / heads) for head in range(heads)),
        text(config, "hidden_act", "silu"),
        name,
    )


@register("minimax_m2")
def minimax_m2(config: Config) -> ModelSpec:
    """Describes a MiniMax-M2, a part of whose channels rotates."""
    config = {"head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 8, **config}
    config = config if "num_experts" in config else {"num_local_experts": 256, **config}
    if config.get("rotary_dim") is not None:
        config = {"partial_rotary_factor": number(config, "rotary_dim") / positive(config, "head_dim"), **config}
    rotary = rope(config, theta=5_000_000.0, knows_partial=True)
    mixer = wide_norms(config, attention(config, rope=rotary))
    experts = mixture(config, name=NAME, parts=PARTS, activation="sigmoid", bias=f"{NAME}.e_score_correction_bias")
    return decoder(config, [mixer] * num_layers(config), experts)
