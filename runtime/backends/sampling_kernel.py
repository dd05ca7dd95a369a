"""Sampling kernels as backends offer them, on the host and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from runtime.core.batch import SamplingMetadata, SamplingTensors

INFINITE, FORBIDDEN, UNDECIDED = -1, -2, -3
"""Instead of a token: the row is not finite, nothing may be sampled, or another look at the row is needed."""


class SamplingKernel(Protocol):
    """Tokens and log-probabilities from rows of logits in the host's memory."""

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str:
        """Why it cannot read logits of a dtype on a device; "" when it can."""
        ...

    def sample(self, logits: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
        """The token of each row of `logits [R, V]`, or an outcome, int64 `[R]`, with all that the draws ask for."""
        ...

    def logprobs(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities `[R]` of one token per row, and the `K = min(num_top, V)` most likely ids `[R, K]` with
        theirs, of equal ones the lowest id first."""
        ...


class FusedSampling(Protocol):
    """Sampling of all rows in launches that depend on shapes only, so that a CUDA graph can end with them."""

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str:
        """As `SamplingKernel.unsupported_reason`."""
        ...

    def sample(self, logits: Tensor, scores: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
        """Writes the token of each row, or an outcome, to int64 `tokens [R]`; greedy where the temperature is 0.

        Args:
            scores: the processed logits `[R, V]`, or `logits` itself.
        """
        ...

    def sample_listed(
        self,
        scores: Tensor,
        ids: Tensor,
        unknown: Tensor,
        is_truncated: Tensor,
        tensors: SamplingTensors,
        tokens: Tensor,
    ) -> None:
        """Replaces the token of each truncated row by one of `ids [R, K]` with `scores [R, K]`, or by `UNDECIDED`
        where `unknown [R]` says that other tokens may win."""
        ...
