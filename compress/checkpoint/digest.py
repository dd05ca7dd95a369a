"""Digests of what a checkpoint stores, and whether what is read back has those that were taken when it was made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import tensor_bytes
from compress.checkpoint.weights import PackedWeight
from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.checkpoint.weights.outlier_columns import OutlierWeight
from compress.checkpoint.weights.sparse_nm import PrunedWeight


def digest(weight: PackedWeight | Tensor) -> str:
    """SHA-256 of codes, scales and zero points, equal for the same integers whatever format stores them; or of the
    dtype, shape and bytes of what is not quantized; or of all the parts."""
    if isinstance(weight, PrunedWeight):
        return digest(weight.values)
    if isinstance(weight, OutlierWeight):
        return _joint_digest(weight.base, weight.columns, weight.values)
    if isinstance(weight, LowRankWeight):
        return _joint_digest(*weight.factors)
    if isinstance(weight, Tensor):
        kind, parts = f"{weight.dtype} {tuple(weight.shape)}", [weight]
    elif isinstance(weight, Fp8Weight):
        kind, parts = f"fp8 {weight.shape}", [weight.codes, weight.scale.to(torch.float64)]
    else:
        kind = f"{weight.scheme.bits} {weight.scheme.group_size} {weight.shape}"
        parts = [weight.codes, weight.scale.to(torch.float64), weight.zero]
    state = hashlib.sha256(kind.encode())
    for part in parts:
        state.update(tensor_bytes(part))
    return state.hexdigest()


def _joint_digest(*parts: PackedWeight | Tensor) -> str:
    return hashlib.sha256(" ".join(map(digest, parts)).encode()).hexdigest()


def verify_against(path: str | Path, expected: Mapping[str, str]) -> list[str]:
    """Compares what is stored with the digests taken when it was made.

    Args:
        expected: digest by name: of every quantized module, and of any dense tensors.

    Returns:
        One line per name that differs, is missing or was not expected; empty when all agree.
    """
    packed = PackedCheckpoint.open(path)
    problems = [
        f"{name} is stored quantized but has no recorded digest" for name in packed.modules if name not in expected
    ]
    for name, recorded in expected.items():
        if name in packed.schemes:
            if digest(packed.packed_weight(name)) != recorded:
                problems.append(f"{name} reads back with other codes, scales or zero points than were chosen")
        elif name not in packed.files:
            problems.append(f"{name} was written but is not stored so any more")
        elif digest(packed.tensor(name)) != recorded:
            problems.append(f"{name} reads back with other bytes than were written")
        packed.files.release()
    return problems
