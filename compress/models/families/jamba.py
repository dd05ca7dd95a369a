"""Jamba (arXiv:2403.19887): Mamba-1 in most layers, attention without positions in the others, and mixtures in some."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

from compress.models.config import (
    Config,
    attention,
    by_kind,
    decoder,
    flag,
    gated_mlp,
    integer,
    mixture,
    norm,
    num_layers,
    positive,
    refusal,
    text,
)
from compress.models.cuts import Cuts, size, stacked
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.mixer import ConvolvedMixer
from compress.models.mlp import MLP, Mixture
from compress.models.norm import Norm
from compress.models.registry import register
from compress.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Mamba1(ConvolvedMixer):
    """A selective state space model (arXiv:2312.00752, section 3) after a short causal convolution, as in Jamba.

    Attributes:
        state_size: numbers that the state keeps for each channel.
        qkv: one projection, of channels and their gates, in this order.
        select: reads the convolved channels and gives inner channels of steps, and inputs and outputs of the state, in
            this order; stays dense.
        step: reads these inner channels and gives the step of each channel; stays dense.
        norms: over each of the three parts that `select` gives.
    """

    size: int
    state_size: int
    qkv: tuple[Linear, ...]
    select: Linear
    step: Linear
    output: Linear
    norms: tuple[Norm, ...] = field()
    kernel: int
    has_conv_bias: bool = True
    activation: str = "silu"
    name: str = "mamba"

    @property
    def own_vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its decay and skipped share by tensor name."""
        return {f"{self.name}.A_log": self.matrix, f"{self.name}.D": (self.size,)}

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense."""
        return self.select, self.step

    @property
    def conv_size(self) -> int:
        return self.size

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.size, self.state_size

    def cut(self, cuts: Cuts) -> Self:
        """Cuts all by channel; ranks sum what `select` gives."""
        own = cuts.share(self.size, self.output)
        self.cut_conv(cuts, own)
        for name in self.own_vectors:
            cuts.vector(name, own)
        return replace(
            self,
            size=size(own),
            qkv=(cuts.rows(self.qkv[0], *stacked(*2 * ((own, self.size),))),),
            select=cuts.columns(self.select, own),
            step=cuts.rows(self.step, own),
            output=cuts.columns(self.output, own),
        )


DEFAULTS = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_experts_per_tok": 2}
NAME = "feed_forward"


@register("jamba")
def jamba(config: Config) -> ModelSpec:
    config = {**DEFAULTS, **config}
    config = config if "num_local_experts" in config else {"num_experts": 16, **config}
    mixers: dict[str, Attention | Mamba1] = {
        "linear_attention": _mamba1(config),
        "full_attention": attention(config, rope=None),
    }
    periodic = _periodic(config, "attn_layer", 8, 4)
    chosen = by_kind(config, ["full_attention" if is_one else "linear_attention" for is_one in periodic], mixers)
    norms = ("input_layernorm", "pre_ff_layernorm")
    return decoder(config, chosen, _mlps(config), norms=norms, final="model.final_layernorm")


def _periodic(config: Config, part: str, period: int, offset: int) -> list[bool]:
    """Reads which layers are of a kind. Raises CheckpointError for an offset that no layer has."""
    period = positive(config, f"{part}_period", period)
    offset = integer(config, f"{part}_offset", offset)
    if not 0 <= offset < period:
        raise refusal(f"{part}_offset", offset, f"0 to {period - 1}")
    return [layer % period == offset for layer in range(num_layers(config))]


def _mlps(config: Config) -> list[MLP | Mixture]:
    """Lists the MLP or mixture of each layer."""
    dense = gated_mlp(config, name=NAME)
    count = positive(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    if count == 1:
        return [dense] * num_layers(config)
    experts = mixture(config, name=NAME, scores="router", normalizes=False)
    return [experts if is_one else dense for is_one in _periodic(config, "expert_layer", 2, 1)]


def _mamba1(config: Config) -> Mamba1:
    """Composes a layer of Mamba-1 with norms of steps, inputs and outputs of the state."""
    name, hidden = "mamba", positive(config, "hidden_size")
    size, state = hidden * positive(config, "mamba_expand", 2), positive(config, "mamba_d_state", 16)
    auto = config.get("mamba_dt_rank", "auto") == "auto"
    rank = math.ceil(hidden / 16) if auto else positive(config, "mamba_dt_rank")
    bias, norms = flag(config, "mamba_proj_bias"), {"dt": rank, "b": state, "c": state}
    return Mamba1(
        size,
        state,
        (Linear(f"{name}.in_proj", 2 * size, hidden, bias),),
        Linear(f"{name}.x_proj", rank + 2 * state, size, is_inner=True),
        Linear(f"{name}.dt_proj", size, rank, bias=True, is_inner=True),
        Linear(f"{name}.out_proj", hidden, size, bias, split="rows"),
        tuple(norm(config, f"{name}.{part}_layernorm", channels) for part, channels in norms.items()),
        positive(config, "mamba_d_conv", 4),
        flag(config, "mamba_conv_bias", True),
        text(config, "hidden_act", "silu"),
        name,
    )
