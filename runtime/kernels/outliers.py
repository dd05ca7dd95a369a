"""A quantized weight with some input columns in 16 bits: the product of its codes by any kernel, and a thin one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.kernels.base import Linear


@dataclass(frozen=True, slots=True)
class WithOutliers:
    """`base(x without the columns) + x[:, columns] values^T`. Where inputs are rounded to 8 bits, their scale thus
    comes from the other columns alone, as LLM.int8() (arXiv:2208.07339) has it.

    Attributes:
        base: multiplies by the codes; the bias belongs to it.
        columns: int64 `[k]`.
        values: `[k, O]`, in the activation dtype.
    """

    base: Linear
    columns: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """The few column numbers are not counted."""
        return self.base.nbytes + self.values.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        rest = x.index_fill(1, self.columns, 0)
        return self.base(rest).addmm(x.index_select(1, self.columns), self.values)
