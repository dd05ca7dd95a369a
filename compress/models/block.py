"""Blocks of decoders."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.models.block_parts import LayerInput, ParallelMixture, Residual, SecondMixer
from compress.models.cuts import Cuts
from compress.models.linear import Linear
from compress.models.mixers.mixer import Mixer
from compress.models.mlp import MLP, Mixture
from compress.models.norm import Norm


@dataclass(frozen=True, slots=True)
class Block:
    """A transformer block: `x += mixer(input_norm(x))`, then `x += mlp(mlp_norm(x))`.

    Attributes:
        mixer, mlp: None, and so are their norms, in a block of one part.
        input_norm, mlp_norm: None where the residual stream is read as it is. In a parallel block `mlp_norm` is None,
            and `mlp` reads what `mixer` reads.
        output_norm, mlp_output_norm: norms of what mixer and MLP add.
        residual: factors on the residual stream and on what is added to it; None for none.
        second: another mixer, next to attention.
        parallel_mixture: a mixture that is computed in parallel with the MLP, from the residual stream.
        layer_input: what is added after the MLP.
        scalar: name of a number that the residual stream is multiplied by last; "" for none.
    """

    input_norm: Norm | None
    mixer: Mixer | None
    mlp_norm: Norm | None
    mlp: MLP | Mixture | None
    output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    residual: Residual | None = None
    is_parallel: bool = False
    second: SecondMixer | None = None
    parallel_mixture: ParallelMixture | None = None
    layer_input: LayerInput | None = None
    scalar: str = ""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        both = self.mixer, None if self.second is None else self.second.mixer
        return tuple(mixer for mixer in both if mixer is not None)

    @property
    def mixture(self) -> Mixture | None:
        """Its mixture, in place of the MLP or in parallel with it."""
        return next((part for part in self.parts if isinstance(part, Mixture)), None)

    @property
    def parts(self) -> tuple[MLP | Mixture, ...]:
        """Its MLP, and the mixture in parallel with it."""
        both = self.mlp, None if self.parallel_mixture is None else self.parallel_mixture.mixture
        return tuple(part for part in both if part is not None)

    @property
    def linears(self) -> tuple[Linear, ...]:
        last = () if self.layer_input is None else (self.layer_input.gate, self.layer_input.output)
        inner = (linear for part in (*self.mixers, *self.parts) for linear in part.linears)
        return *inner, *last

    @property
    def routers(self) -> tuple[Linear, ...]:
        mixers = (linear for mixer in self.mixers for linear in mixer.routers)
        return *mixers, *(() if self.mixture is None else self.mixture.routers)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that belongs to no linear and no norm, by name."""
        found = {name: shape for part in (*self.mixers, *self.parts) for name, shape in part.vectors.items()}
        return found | ({self.scalar: (1,)} if self.scalar else {})

    @property
    def mlps(self) -> tuple[MLP, ...]:
        return tuple(mlp for part in self.parts for mlp in (part.mlps if isinstance(part, Mixture) else (part,)))

    @property
    def norms(self) -> tuple[Norm, ...]:
        last = None if self.layer_input is None else self.layer_input.norm
        around = self.input_norm, self.output_norm, self.mlp_norm, self.mlp_output_norm, last
        parallel = () if self.parallel_mixture is None else self.parallel_mixture.norms
        inner = (norm for mixer in self.mixers for norm in mixer.norms)
        return *(norm for norm in around if norm is not None), *inner, *parallel

    def cut(self, cuts: Cuts) -> Block:
        """Returns the part of a rank; what is added last is whole."""
        second, parallel = self.second, self.parallel_mixture
        return replace(
            self,
            mixer=None if self.mixer is None else self.mixer.cut(cuts),
            mlp=None if self.mlp is None else self.mlp.cut(cuts),
            second=None if second is None else replace(second, mixer=second.mixer.cut(cuts)),
            parallel_mixture=None if parallel is None else replace(parallel, mixture=parallel.mixture.cut(cuts)),
        )
