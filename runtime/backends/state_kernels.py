"""Protocols and records of kernels that compute mixers with a state: all between their linears, in one call.

Plain torch in `runtime.model.mixers` is the oracle of every kernel. A kernel serves one kind of mixer, and either every
step or only decode, in which each sequence has one row. It includes the convolution, gates and norm of its mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from runtime.backends.base import NormWeights, Target
from runtime.core.state_rows import StateRows


class StateStep(Protocol):
    """All that one layer computes between its linears."""

    def __call__(self, projected: Sequence[Tensor], states: Mapping[str, Tensor], rows: StateRows) -> Tensor:
        """Computes what the output linear reads, `[T, C]` in the dtype of activations.

        Args:
            projected: what linears give that read the residual stream, `[T, O]` each: those of `qkv` side by side,
                and, where the mixer has some, those that stay dense, side by side.
            states: by name as in `state_fields`, `[slots, *shape]`; read and written as `rows` says.
        """


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Vectors of a gated delta net in addition to its linears. All but the norm have the dtype of the state.

    Attributes:
        conv: `[kernel, channels]`.
        decay: `-exp(A_log) [heads]`.
        dt_bias: `[heads]`.
        norm: over each value head, before its gate.
    """

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: NormWeights


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """Vectors of a layer of Mamba-2 in addition to its linears. All but the norm have the dtype of the state.

    Attributes:
        conv: `[kernel, channels]`.
        conv_bias: `[channels]`.
        decay: `-exp(A_log) [heads]`.
        dt_bias: `[heads]`.
        skip: share of its input that is added to the output of a head, `[heads]`.
        norm: over the heads of each group.
    """

    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: NormWeights | None


Mixer = TypeVar("Mixer")
Weights = TypeVar("Weights")


@dataclass(frozen=True, slots=True)
class StateKernel(Generic[Mixer, Weights]):
    """One way to compute a kind of mixer.

    Attributes:
        mixer: class of the descriptions that it serves.
        unsupported_reason: why it cannot compute a mixer with these weights on a target; "" when it can.
        prepare: called once for each layer, at load.
        only_decode: it takes no steps in which a sequence has more rows than one.
    """

    mixer: type[Mixer]
    summary: str
    unsupported_reason: Callable[[Mixer, Weights, Target], str]
    prepare: Callable[[Mixer, Weights, Target], StateStep]
    only_decode: bool = False


@dataclass(frozen=True, slots=True)
class StateSteps:
    """Kernels of one layer with a state; None where plain torch computes it.

    Attributes:
        decode: for steps in which each sequence has one row.
        spans: for all others.
        reason: which ones they are, and why they and none before them.
    """

    decode: StateStep | None = None
    spans: StateStep | None = None
    reason: str = ""

    def of(self, rows: StateRows) -> StateStep | None:
        """Returns the kernel of a step."""
        return self.decode if rows.is_single else self.spans
