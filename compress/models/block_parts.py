"""Parts that few blocks have: a second mixer or mixture, inputs of a layer's own, and queries that grow."""

from __future__ import annotations

from dataclasses import dataclass

from compress.models.linear import Linear
from compress.models.mixers.mixer import Mixer
from compress.models.mlp import Mixture
from compress.models.norm import Norm


@dataclass(frozen=True, slots=True)
class SecondMixer:
    """A mixer with a state next to attention: both read the same, and each adds `factor * mixer(input_factor * x)`.
    `attention_factors`, `factors`: `input_factor` and `factor` of attention, and of the mixer."""

    mixer: Mixer
    attention_factors: tuple[float, float] = (1.0, 1.0)
    factors: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class ParallelMixture:
    """A mixture in parallel with the MLP of a block: `mlp_norm(mlp(...)) + output_norm(mixture(input_norm(x)))`.
    `router_norm`: norm of what the router reads, the residual stream x."""

    mixture: Mixture
    mlp_norm: Norm
    input_norm: Norm
    output_norm: Norm
    router_norm: Norm

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self.mlp_norm, self.input_norm, self.output_norm, self.router_norm


@dataclass(frozen=True, slots=True)
class Residual:
    """Factors around mixer and MLP, in this order: `x += scale * mixer(norm(x))`.

    Attributes:
        scales: on what mixer and MLP add.
        kept: with them norms replace the residual stream: `x = norm(x)`, then `x = kept * x + scale * mixer(x)`; None
            leaves it as it is.
    """

    scales: tuple[float, float]
    kept: tuple[float, float] | None = None

    @classmethod
    def scaled(cls, scale: float) -> Residual | None:
        """Makes those of one factor on all that is added."""
        return None if scale == 1.0 else cls((scale, scale))


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The last sum of a block: `x += norm(output(activation(gate(x)) * e))` with its row e of `LayerInputs`."""

    gate: Linear
    output: Linear
    norm: Norm
    activation: str


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A row of every token for each layer: `(norm(projection(x) / H ** 0.5) + embedding * size ** 0.5) / 2 ** 0.5`.

    Attributes:
        embedding: absolute name of the matrix `[vocab_size, layers * size]`, which is looked up and stays dense.
        projection: of the embedded token x of H channels, with its absolute name; stays dense.
        norm: over each row, with its absolute name.
    """

    embedding: str
    vocab_size: int
    size: int
    projection: Linear
    norm: Norm

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the embedding."""
        return self.vocab_size, self.projection.out_features


@dataclass(frozen=True, slots=True)
class PositionScale:
    """Factor `1 + beta * log(1 + floor((position + first) / length))` on rotated queries, as in Llama 4."""

    beta: float
    length: int
    first: int = 0
