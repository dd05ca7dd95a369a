"""Small checks that the formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.common.errors import CheckpointError, SchemeError

Get = Callable[[str], Tensor]
"""Gives a stored tensor by its full name; raises CheckpointError when there is none."""


def optional(get: Get, name: str) -> Tensor | None:
    """A tensor that may be absent."""
    try:
        return get(name)
    except CheckpointError:
        return None


def owners(names: Iterable[str], suffix: str) -> list[str]:
    """Modules that own a tensor with this suffix, sorted."""
    return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))


def cast_exactly(module: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in the dtype that is stored. Raises SchemeError when that would change a value."""
    stored = scale.to(dtype)
    changed = stored.to(torch.float64) != scale.to(torch.float64)
    if bool(changed.any()):
        worst = scale[changed].abs()
        raise SchemeError(
            f"{int(changed.sum())} of {scale.numel()} scales of {module} (|scale| {float(worst.min()):.3g} to "
            f"{float(worst.max()):.3g}) have no exact {str(dtype).removeprefix('torch.')} value",
            "Keep the compressed-tensors format, which stores scales in the model's dtype",
        )
    return stored


def refuse_structure(name: str, scheme: Scheme) -> None:
    """Raises SchemeError for a scheme that leaves zeros out, has factors or outlier columns, which a format of other
    tools cannot."""
    if scheme.outliers is not None:
        raise SchemeError(f"{name} cannot hold the 16-bit columns of {scheme}", "Use --format dense")
    if scheme.rank is not None:
        raise SchemeError(f"{name} cannot hold the two factors of {scheme}", "Use --format dense")
    if scheme.sparsity is not None:
        raise SchemeError(f"{name} cannot leave out the zeros of {scheme}", "Use --format dense")


def refuse_floats(name: str, scheme: Scheme) -> None:
    """Raises SchemeError for 8-bit floats, which a format of integers has no codes for."""
    if scheme.fp8:
        raise SchemeError(f"{name} has no 8-bit floats", "Keep compressed-tensors, or use --format dense")


def refuse_activation_order(module: str, group_index: Tensor | None, in_features: int, group_size: int | None) -> None:
    """Codes here are in the original column order, so a group index may only repeat `column // group_size`."""
    if group_index is None:
        return
    plain = torch.arange(in_features) // (group_size or in_features)
    if group_index.shape != plain.shape or not torch.equal(group_index.to(torch.int64), plain):
        raise CheckpointError(
            f"{module} is stored with an activation-order group index (desc_act), which this toolkit does not read",
            "Quantize again with static groups (desc_act false)",
        )
