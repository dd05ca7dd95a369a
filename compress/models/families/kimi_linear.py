"""Kimi Linear (arXiv:2510.26692): Kimi delta attention in most layers, latent attention without positions in the rest,
and mixtures whose first layers are dense."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from compress.models.config import (
    SIGMOID_ROUTER,
    Config,
    block,
    by_kind,
    decoder,
    gated_mlp,
    grouped_mixture,
    mlps_by_kind,
    norm,
    num_layers,
    number,
    positive,
    refusal,
    text,
)
from compress.models.cuts import Cuts, scaled, size
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.latent import latent_attention
from compress.models.mixers.mixer import Mixer, StateField
from compress.models.mlp import MLP, Mixture
from compress.models.norm import Norm
from compress.models.registry import register
from compress.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KimiDelta(Mixer):
    """Linear attention by the delta rule with a decay for each channel of a key (arXiv:2510.26692, section 3).

    Attributes:
        qkv: projections of queries, keys and values, in this order, each followed by a short causal convolution.
        gates: projections to the inner channels of the decay and of the output gate, and of the strength of each
            update (beta), in this order; stay dense.
        decay, gate: read these inner channels; stay dense.
        norm: over each head, before its gate, whose sigmoid multiplies it.
    """

    num_heads: int
    head_dim: int
    qkv: tuple[Linear, ...]
    gates: tuple[Linear, ...]
    decay: Linear
    gate: Linear
    output: Linear
    norm: Norm
    kernel: int
    activation: str = "silu"
    name: str = "self_attn"
    inlined: ClassVar[str] = "forget_gate"

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def decays(self) -> str:
        """Name of the logarithms of the decay of each head."""
        return f"{self.name}.A_log"

    @property
    def joined_convs(self) -> tuple[str, ...]:
        """Names of the weights of the convolutions, in the order of `qkv`."""
        return tuple(f"{self.name}.{part}_conv1d.weight" for part in "qkv")

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its convolutions, decay and offset of the decay by tensor name."""
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.joined_convs, (self.size, 1, self.kernel))
        return found | {self.decays: (1, 1, self.num_heads, 1), f"{self.name}.dt_bias": (self.size,)}

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (self.norm,)

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense."""
        return *self.gates, self.decay, self.gate

    @property
    def state_fields(self) -> dict[str, StateField]:
        """The last inputs of the convolutions, and a matrix for each head."""
        matrix = self.num_heads, self.head_dim, self.head_dim
        return {"window": StateField((self.kernel - 1, 3 * self.size)), "matrix": StateField(matrix, is_exact=True)}

    def cut(self, cuts: Cuts) -> Self:
        """Cuts all by head; every rank has the projections to the inner channels of the gates whole."""
        heads = cuts.share(self.num_heads, self.output, self.head_dim)
        own, (*inner, beta) = scaled(heads, self.head_dim), self.gates
        for name in self.vectors:
            cuts.vector(name, heads if name == self.decays else own)
        return replace(
            self,
            num_heads=size(heads),
            qkv=tuple(cuts.rows(linear, own) for linear in self.qkv),
            gates=(*inner, cuts.rows(beta, heads)),
            decay=cuts.rows(self.decay, own),
            gate=cuts.rows(self.gate, own),
            output=cuts.columns(self.output, own),
        )


PUBLISHED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names of fields that other families have, by those that checkpoints have for them."""
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
}
MIXTURE = "block_sparse_moe"


@register("kimi_linear", renamed=(rf"\.{MIXTURE}\.(gate|up|down)_proj\.", r".mlp.\1_proj."))
def kimi_linear(config: Config) -> ModelSpec:
    """Describes a Kimi Linear, whose head is never the embedding."""
    config = {**DEFAULTS, **{PUBLISHED.get(key, key): value for key, value in config.items()}}
    config = config if "num_local_experts" in config else {"num_experts": 256, **config}
    mixers: dict[str, Attention | KimiDelta] = {
        "linear_attention": _delta(config),
        "full_attention": latent_attention(config, None),
    }
    return replace(decoder(config, by_kind(config, _kinds(config), mixers), _mlps(config)), tied=False)


def _kinds(config: Config) -> object:
    """Reads the kind of every layer, which checkpoints count from 1."""
    kinds, parts, layers = config.get("layer_types"), block(config, "linear_attn_config"), range(num_layers(config))
    if kinds is not None:
        return kinds
    if not {"full_attn_layers", "kda_layers"} <= parts.keys():
        return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in layers]
    full, linear = parts["full_attn_layers"], parts["kda_layers"]
    if not isinstance(full, list) or not isinstance(linear, list) or sorted(full + linear) != [i + 1 for i in layers]:
        raise refusal("linear_attn_config", parts, f"the layers 1 to {len(layers)} in its two lists")
    return ["linear_attention" if layer + 1 in linear else "full_attention" for layer in layers]


def _mlps(config: Config) -> list[MLP | Mixture]:
    """Lists the MLP or mixture of each layer."""
    size = positive(config, "moe_intermediate_size") * positive(config, "n_shared_experts", 1)
    experts = grouped_mixture(
        config,
        name=MIXTURE,
        parts=("w1", "w3", "w2"),
        shared=gated_mlp(config, name=f"{MIXTURE}.shared_experts", size=size),
        **{**SIGMOID_ROUTER, "bias": f"{MIXTURE}.gate.e_score_correction_bias"},
    )
    dense, num_dense = gated_mlp(config), number(config, "first_k_dense_replace", 1)
    default = [dense if layer < num_dense else experts for layer in range(num_layers(config))]
    return mlps_by_kind(config, experts, default)


KERNEL = "short_conv_kernel_size"


def _delta(config: Config) -> KimiDelta:
    """Composes a layer of Kimi delta attention; sizes in `linear_attn_config` win, as in transformers."""
    parts, name, hidden = block(config, "linear_attn_config"), "self_attn", positive(config, "hidden_size")
    older = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads", "linear_conv_kernel_dim": KERNEL}
    sizes = {**config, **{key: parts[inner] for key, inner in older.items() if inner in parts}}
    heads, head_dim = positive(sizes, "linear_num_heads", 32), positive(sizes, "linear_head_dim", 128)
    gates = {"f_a_proj": head_dim, "g_a_proj": head_dim, "b_proj": heads}
    decay, gate = (Linear(f"{name}.{part}_b_proj", heads * head_dim, head_dim, is_inner=True) for part in "fg")
    return KimiDelta(
        heads,
        head_dim,
        tuple(Linear(f"{name}.{part}_proj", heads * head_dim, hidden) for part in "qkv"),
        tuple(Linear(f"{name}.{part}", rows, hidden) for part, rows in gates.items()),
        decay,
        gate,
        Linear(f"{name}.o_proj", hidden, heads * head_dim, split="rows"),
        norm(config, f"{name}.o_norm", head_dim, in_float32=True),
        positive(sizes, "linear_conv_kernel_dim", 4),
        text(config, "hidden_act", "silu"),
        name,
    )
