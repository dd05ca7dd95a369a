"""How the inputs of a linear in a quantized model differ from those in the dense one, as a second moment."""

from __future__ import annotations

import torch
from torch import Tensor

from calibration.statistics import full_float32


class InputDifference:
    """Accumulates `D^T X` over batches: `X` the inputs in the quantized model, `X + D` those in the dense one.

    Args:
        in_features: `I`.
        device: where the sum lives.
    """

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self._moment = torch.zeros(in_features, in_features, device=device)
        self.count = 0

    def update(self, inputs: Tensor, dense: Tensor) -> None:
        """Adds a batch: `inputs [..., I]` and, at the same tokens, `dense [..., I]`.

        Raises:
            ValueError: other shapes, so not the same tokens.
        """
        if inputs.shape != dense.shape:
            raise ValueError(f"inputs {tuple(inputs.shape)} and {tuple(dense.shape)} are not of the same tokens")
        rows = inputs.detach().reshape(-1, self._moment.shape[0]).float()
        change = dense.detach().reshape(rows.shape).float() - rows
        with full_float32():
            self._moment.addmm_(change.T, rows)
        self.count += len(rows)

    @property
    def moment(self) -> Tensor:
        """`[I, I]` float32: `2 D^T X / count`, rows of D; the unit of `InputStatistics.hessian`."""
        return self._moment * (2.0 / max(self.count, 1))
