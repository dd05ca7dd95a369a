"""A weight that is pruned and not quantized: values in the model's dtype, most of them stored, the others zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme, Sparsity
from compress.common.errors import SchemeError


@dataclass(frozen=True, slots=True)
class PrunedWeight:
    """`W [O, I]` with zeros in the pattern of `scheme.sparsity`.

    Attributes:
        values: `[O, I]`, float, zeros in place.
        scheme: 16 bits and a sparsity.

    Raises:
        SchemeError: the scheme is one of integers.
    """

    values: Tensor
    scheme: Scheme

    def __post_init__(self) -> None:
        if not self.scheme.is_float:
            raise SchemeError(f"{self.scheme} is not a scheme of pruned 16-bit values")

    @property
    def sparsity(self) -> Sparsity:
        """Which values are zero."""
        if self.scheme.sparsity is None:
            raise SchemeError(f"{self.scheme} has no sparsity")
        return self.scheme.sparsity

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight `[O, I]`."""
        return self.values.to(dtype)

    def cpu(self) -> PrunedWeight:
        """The same in host memory."""
        return PrunedWeight(self.values.cpu(), self.scheme)
