"""Packed weights that are unpacked on the device that serves them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compress.checkpoint.expert_files import ExpertFiles
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Scheme


@dataclass
class DeviceFiles(ExpertFiles):
    """Tensor files that place matrices of integers (codes and zero points) on a device, and nothing else."""

    device: torch.device = field(kw_only=True)

    def tensor(self, name: str) -> Tensor:
        tensor = super().tensor(name)
        return tensor if tensor.dim() != 2 or tensor.is_floating_point() else tensor.to(self.device)


def unpacked_on(checkpoint: PackedCheckpoint, device: torch.device) -> PackedCheckpoint:
    """Returns the checkpoint with integers unpacked on `device` and scales in host memory.

    For modules that `unpacks_anywhere`.
    """
    files = checkpoint.files
    return replace(checkpoint, files=DeviceFiles(**vars(files), device=device))


def unpacks_anywhere(scheme: Scheme | None) -> bool:
    """Whether a module is plain integers, unpacked by operations on one matrix at a time."""
    return scheme is not None and scheme.numbers == "int" and not scheme.structure
