"""What can be wrong with one packed weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.checkpoint.expected import expected_shape
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.low_rank import LowRankWeight
from compress.checkpoint.outliers import OutlierWeight
from compress.checkpoint.packed import CodedWeight, PackedWeight
from compress.checkpoint.pruned import PrunedWeight
from compress.checkpoint.reader import PackedCheckpoint


def weight_problems(packed: PackedCheckpoint, module: str, weight: PackedWeight) -> Iterator[str]:
    """What is wrong with the shape, size or numbers of one packed weight, a line each."""
    expected = expected_shape(module, packed.config)
    if expected and expected != weight.shape:
        yield f"{module} is {weight.shape}, but config.json says {expected}"
    if isinstance(weight, LowRankWeight):
        yield from _low_rank_problems(packed, module, weight)
        return
    if isinstance(weight, OutlierWeight):
        yield from _outlier_problems(packed, module, weight)
        return
    yield from _number_problems(module, weight.values if isinstance(weight, PrunedWeight) else weight)
    yield from _sparsity_problems(module, weight)


def _low_rank_problems(packed: PackedCheckpoint, module: str, weight: LowRankWeight) -> Iterator[str]:
    for side, factor in zip(("left", "right"), weight.factors, strict=True):
        yield from _number_problems(f"{module}.{side}", factor)
    yield from _size_problems(packed, module, weight)
    rows, columns = weight.shape
    if weight.scheme.rank is not None and weight.scheme.rank * (rows + columns) >= rows * columns:
        yield f"{module} has more weights in its factors than in their product {weight.shape}"


def _outlier_problems(packed: PackedCheckpoint, module: str, weight: OutlierWeight) -> Iterator[str]:
    yield from _number_problems(module, weight.base)
    yield from _number_problems(f"{module}.outlier_values", weight.values)
    yield from _size_problems(packed, module, weight)


def _size_problems(packed: PackedCheckpoint, module: str, weight: LowRankWeight | OutlierWeight) -> Iterator[str]:
    stored, promised = 8 * packed.weight_bytes(module), weight.scheme.stored_bits(*weight.shape, _model_bits(packed))
    if stored != promised:
        yield f"{module} takes {stored} bits, but {weight.scheme} of {weight.shape} means {promised}"


def _model_bits(packed: PackedCheckpoint) -> int:
    return 8 * packed.dtype.itemsize


def _number_problems(name: str, weight: CodedWeight | Tensor) -> Iterator[str]:
    if not isinstance(weight, Tensor):
        yield from _code_problems(name, weight)
    elif not bool(torch.isfinite(weight.to(torch.float32)).all()):
        yield f"{name} holds NaN or infinity"


def _sparsity_problems(module: str, weight: PackedWeight) -> Iterator[str]:
    sparsity = weight.scheme.sparsity
    if sparsity is None:
        return
    nonzero = weight.dequantize().view(weight.shape[0], -1, sparsity.of) != 0
    crowded = int((nonzero.sum(-1) > sparsity.kept).sum())
    if crowded:
        yield f"{module} has {crowded} groups with more than {sparsity} values"


def _code_problems(module: str, weight: CodedWeight) -> Iterator[str]:
    largest = weight.scheme.max_code
    if isinstance(weight, IntegerWeight) and max(int(weight.codes.max()), int(weight.zero.max())) > largest:
        yield f"{module} has codes or zero points above {largest}"
    bad = int((~torch.isfinite(weight.scale.to(torch.float32))).sum())
    if bad:
        yield f"{module} has {bad} scales that are not finite"
