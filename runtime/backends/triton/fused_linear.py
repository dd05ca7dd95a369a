"""Linears that leave their first and last step to the kernels around them: inputs in the layout that a product reads
best, and products whose partial sums are not added yet. Does not import Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from runtime.backends.base import Linear

ROWS, SUMS, Q8_INT, Q8_FLOAT = "rows", "sums", "q8_int", "q8_float"


class ActivationLayout(NamedTuple):
    """Layout in which a linear takes its input `[M, K]`.

    Attributes:
        kind: `rows` (as they are, in 16 bits), `sums` (and float32 sums of every `unit` inputs), `q8_int`
            (int8, with a scale for each token, see `compress.checkpoint.weights.fp8`), or `q8_float`
            (bytes of e4m3).
        unit: inputs of one sum, a power of two.
        num_sums: of a token; what lies beyond K counts as zeros.
    """

    kind: str = ROWS
    unit: int = 32
    num_sums: int = 0


ROWS_LAYOUT = ActivationLayout()


class QuantizedInput(NamedTuple):
    """An input in some form.

    Attributes:
        rows: `[M, K]`, 16-bit numbers, int8 or bytes (uint8) of e4m3, contiguous.
        beside: float32; sums `[num_sums, M]`, scales `[M]` of quantized activations, or None.
    """

    rows: Tensor
    beside: Tensor | None = None


class SumsForm(NamedTuple):
    """Form of partial sums: number of parts, and what their sum is multiplied by and added to."""

    splits: int = 1
    has_bias: bool = False
    has_scales: bool = False


class PartialSums(NamedTuple):
    """`x W^T + bias [M, N]`, still in parts: the sum of `parts`, times both scales if there are any, plus the bias;
    rounded to 16 bits once, by whoever adds it up.

    Attributes:
        parts: `[splits, M, at least N]`, float32 or int32, contiguous; or 16-bit rows `[1, M, N]` with nothing left to
            do.
        num_rows: N.
        bias: `[N]`, or None.
        scales: of each token, float32 `[M]`, and of each row of the weight, `N` numbers; or None.
    """

    parts: Tensor
    num_rows: int
    bias: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def form(self) -> SumsForm:
        return SumsForm(self.parts.shape[0], self.bias is not None, self.scales is not None)


@runtime_checkable
class FusedLinear(Protocol):
    """A linear that leaves its first and its last step to the kernels around it."""

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        """Layout that `product` takes for this number of tokens."""

    def product(self, x: QuantizedInput) -> PartialSums:
        """Multiplies an input of the form that `activation_layout` names."""


@dataclass(frozen=True, slots=True)
class CalledLinear:
    """Any other linear as a `FusedLinear`: it takes 16-bit rows and leaves nothing to do."""

    linear: Linear

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return ActivationLayout()

    def product(self, x: QuantizedInput) -> PartialSums:
        return finished(self.linear(x.rows))


def fused(linear: Linear) -> FusedLinear:
    """A linear with its first and last step left to others, as far as it can."""
    return linear if isinstance(linear, FusedLinear) else CalledLinear(linear)


def finished(rows: Tensor) -> PartialSums:
    """16-bit rows `[M, N]`, whatever their strides, as a product with nothing left to do."""
    # PyTorch's semi-structured product may give the transpose of what it wrote.
    return PartialSums(rows.contiguous().unsqueeze(0), rows.shape[1])
