"""Packed weights are unpacked where they are used: what crosses to a GPU are words of codes, not a byte for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import Scheme
from compress.checkpoint.source import TensorFiles


@dataclass
class DeviceFiles(TensorFiles):
    """Tensor files whose matrices of integers (codes and zero points) are given on a device; the small rest is not."""

    device: torch.device

    def tensor(self, name: str) -> Tensor:
        tensor = super().tensor(name)
        return tensor if tensor.dim() != 2 or tensor.is_floating_point() else tensor.to(self.device)


def unpacked_on(checkpoint: PackedCheckpoint, device: torch.device) -> PackedCheckpoint:
    """The checkpoint with integers unpacked on `device`; scales stay in host memory. For modules that
    `unpacks_anywhere`."""
    files = checkpoint.files
    return replace(checkpoint, files=DeviceFiles(**vars(files), device=device))


def unpacks_anywhere(scheme: Scheme | None) -> bool:
    """Whether a module is plain integers, unpacked by operations on one matrix at a time."""
    if scheme is None:
        return False
    return not (scheme.fp8 or scheme.sparsity or scheme.rank is not None or scheme.outliers is not None)
