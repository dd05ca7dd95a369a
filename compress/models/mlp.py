"""MLPs, and mixtures of them as experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.models.clamped_gate import ClampedGate
from compress.models.cuts import Cuts, stacked
from compress.models.linear import Linear
from compress.models.router import Router
from compress.models.stacks import Stack


@dataclass(frozen=True, slots=True)
class MLP:
    """`down(activation(gate(x)) * up(x))` (arXiv:2002.05202), or `down(activation(up(x)))`.

    Attributes:
        inputs: gate and up in this order, a single linear where they are stored as one; without a gate, up.
        clamped: replaces activation and gating; None for none.
        curve: module of the learned numbers of activation `xielu`; "" for one without.
        factors: on the gate before its activation, and on the output.
    """

    inputs: tuple[Linear, ...]
    down: Linear
    activation: str = "silu"
    gated: bool = True
    name: str = "mlp"
    clamped: ClampedGate | None = None
    curve: str = ""
    factors: tuple[float, float] = (1.0, 1.0)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.inputs, self.down

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of everything but matrices by tensor name."""
        return {f"{self.curve}.{part}": shape for part, shape in CURVE.items()} if self.curve else {}

    routers = ()

    def cut(self, cuts: Cuts) -> MLP:
        """Returns the part of a rank: some inner channels."""
        total = self.down.in_features
        own = cuts.share(total, self.down)
        rows: tuple[slice, ...] = (own,)
        if self.gated and len(self.inputs) == 1:
            rows = stacked((own, total), (own, total))
        inputs = tuple(cuts.rows(linear, *rows) for linear in self.inputs)
        return replace(self, inputs=inputs, down=cuts.columns(self.down, own))


CURVE: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""Shape of the numbers of xIELU (arXiv:2411.13010) by name."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts: the weighted sum of the chosen ones, and of what all tokens share.

    Attributes:
        experts: all with the same sizes.
        shared: MLP for all tokens; None for none.
        shared_gate: one score for each token, whose sigmoid is the weight of `shared`; None is a weight of 1.
        around: linears before and after `experts`, which read and write fewer channels then; () for none.
        stacks: tensors that may hold the same part of all experts, in place of a tensor for each.
        held: numbers of `experts` among those that the router chooses from; None for all of them.
    """

    router: Router
    experts: tuple[MLP, ...]
    shared: MLP | None = None
    shared_gate: Linear | None = None
    name: str = "mlp"
    stacks: tuple[Stack, ...] = ()
    around: tuple[Linear, ...] = ()
    held: range | None = None

    @property
    def first_held(self) -> int:
        """Number of the first expert."""
        return 0 if self.held is None else self.held.start

    @property
    def mlps(self) -> tuple[MLP, ...]:
        """All experts, and the shared one."""
        return *self.experts, *(() if self.shared is None else (self.shared,))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.around, *(linear for mlp in self.mlps for linear in mlp.linears)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of everything but matrices by tensor name."""
        found = dict(self.router.vectors)
        for mlp in self.mlps:
            found |= mlp.vectors
        return found

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense: a rounded one sends tokens to other experts."""
        return self.router.scores, *(() if self.shared_gate is None else (self.shared_gate,))

    def cut(self, cuts: Cuts) -> Mixture:
        """Returns the part of a rank: some inner channels of every expert, or some experts."""
        if cuts.rank.has_whole_experts:
            own = cuts.experts(len(self.experts), self.name)
            part = replace(self, experts=self.experts[own], held=range(own.start, own.stop))
        else:
            part = replace(self, experts=tuple(expert.cut(cuts) for expert in self.experts))
        return replace(
            part,
            shared=None if self.shared is None else self.shared.cut(cuts),
            around=self.around[:1] + tuple(map(cuts.added_once, self.around[1:])),
        )
