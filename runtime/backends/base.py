"""Linears, norms, operations between linears, and the attention of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from compress.models.clamped_gate import ClampedGate
from runtime.backends.indexer import IndexedTokens


@dataclass(frozen=True, slots=True)
class Target:
    """Device on which products run, and dtype of activations."""

    device: torch.device
    dtype: torch.dtype


class Linear(Protocol):
    """Weight `[O, I]`, perhaps with a bias, prepared for multiplication."""

    @property
    def nbytes(self) -> int:
        """Memory that the prepared weight holds."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, I] -> x W^T + bias [M, O]`, in the dtype of `x`."""


@runtime_checkable
class RowSource(Protocol):
    """Linear whose weight can also be read row by row: a tied head then needs no second copy for the embedding."""

    @property
    def reads_rows(self) -> bool:
        """Whether the layout on this machine allows it."""

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[T, I]` of the weight, dequantized in `dtype`, for int64 `indices [T]`; a new tensor."""


Sum = Callable[[Tensor], Tensor]
"""Sums up the tensors of all ranks that share a model, perhaps in place."""

Gather = Callable[[Tensor, int], Tensor]
"""From rows of the tokens that this rank has to those of all tokens of a step, whose number is given."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm over the last dimension with its weights `[H]`.

    Attributes:
        weight: in the dtype of activations, or in float32 where it multiplies before the result is rounded.
        centered: the mean is subtracted first.
        is_plain: root mean square norm with a weight in the dtype of activations.
        squares: means `[..., 1]` of the squares of inputs `[..., H]`, of a norm over channels of several ranks.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centered: bool = False
    is_plain: bool = True
    squares: Callable[[Tensor], Tensor] | None = None


def plain_weight(norm: NormWeights | None) -> Tensor:
    """Returns the weight of a root mean square norm. Raises ValueError for another norm, or none."""
    if norm is None or not norm.is_plain:
        raise ValueError(f"{norm} is not a plain root mean square norm")
    return norm.weight


class Ops(Protocol):
    """Operations between linears. 16-bit numbers are rounded where transformers rounds them, so that models give the
    same bits, except for sums that are added in another order."""

    def add_rms_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds `update [T, H]` to `hidden [T, H]` in place; returns the RMSNorm of the sum, a new tensor."""

    def rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """RMSNorm with `weight [heads, D]` of every head, if there is one, then the rotary embedding by cosine and
        signed sine `[T, 1, D]`. May change `heads [T, heads, D]` in place and return them."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up [T, I]` of both side by side, `[T, 2 * I]`."""

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """As `silu_and_mul`, with any activation."""

    def clamp_and_mul(self, gate_up: Tensor, gate: ClampedGate) -> Tensor:
        """As `silu_and_mul`, with a clamped gate."""

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """`activation(x)`, a new tensor."""

    def normalize(self, hidden: Tensor, norm: NormWeights) -> Tensor:
        """Any norm of `hidden [..., H]`, a new tensor."""


def add_and_normalize(hidden: Tensor, update: Tensor | None, norm: NormWeights | None, ops: Ops) -> Tensor:
    """Adds `update` to `hidden` in place and returns the norm of the sum; without a norm, the sum itself."""
    if norm is not None and norm.is_plain:
        return ops.add_rms_norm(hidden, update, norm.weight, norm.eps)
    if update is not None:
        hidden.add_(update)
    return hidden if norm is None else ops.normalize(hidden, norm)


class Rotary(Protocol):
    """Rotary embedding of a model."""

    def by(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """Computes cosine and signed sine `[T, 1, D]` that move rotated heads by int64 `distances [T]`."""


class Attention(Protocol):
    """Attention of one step, which also stores its keys and values. One object serves all layers."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention output `[T, heads, D]` of query `[T, heads, D]`, key and value `[T, kv_heads, D]`."""


@runtime_checkable
class SparseAttention(Attention, Protocol):
    """Attention that can leave out tokens."""

    def choose(self, layer: int, tokens: IndexedTokens) -> None:
        """Stores the index keys of a layer, and chooses the tokens that it sees, and later ones without an indexer."""


RunLayers = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From embeddings `[T, H]`, cosine and signed sine `[T, 1, D]` to hidden states `[T, H]`; may overwrite the first."""
