"""Which input columns of a block's linears stay in 16 bits: the same for all linears that read one input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.assignment import Assignment
from compress.checkpoint.outliers import OutlierWeight
from compress.checkpoint.packed import PackedWeight
from compress.checkpoint.scheme import Scheme
from compress.methods.outlier_columns import highest, sensitivity


def choose_columns(
    weights: Mapping[str, Tensor],
    assignments: Mapping[str, Assignment],
    statistics: InputStatistics | None,
    scale: Tensor | None,
) -> dict[str, Tensor]:
    """Columns `[k]`, int64, rising, of every linear whose scheme has outliers.

    Inputs that are rounded to 8 bits are freed of their largest columns, others of those that cost most when the weight
    is rounded.

    Args:
        weights: `[O, I]` of linears that share their input, by name.
        statistics: of that input before smoothing; None when nothing is known.
        scale: `[I]`, what smoothing divided the input by.
    """
    members: dict[Scheme, list[str]] = {}
    for name in weights:
        scheme = assignments[name].quantized
        if scheme is not None and scheme.outliers is not None:
            members.setdefault(scheme, []).append(name)
    chosen: dict[str, Tensor] = {}
    for scheme, names in members.items():
        divided = 1.0 if scale is None else scale
        if scheme.activation_bits and statistics is not None:
            score = statistics.abs_max / divided
        else:
            importance = None if statistics is None else statistics.mean_square / torch.as_tensor(divided) ** 2
            score = sensitivity([weights[name] for name in names], scheme.base, importance)
        chosen |= dict.fromkeys(names, highest(score, scheme.outliers or 0))
    return chosen


def outlier_columns(weights: Mapping[str, PackedWeight], block: str) -> dict[str, Tensor]:
    """Columns `[k]`, int64, of those packed weights that have some, by name inside the block."""
    return {
        module.removeprefix(f"{block}."): weight.columns.long()
        for module, weight in weights.items()
        if isinstance(weight, OutlierWeight)
    }
