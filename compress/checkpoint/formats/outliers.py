"""Columns of a quantized weight that are stored in 16 bits, beside its codes."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.errors import SchemeError
from compress.checkpoint.formats import compressed_tensors
from compress.checkpoint.formats.tensors import Get
from compress.checkpoint.outliers import OutlierWeight
from compress.checkpoint.scheme import Scheme

COLUMNS, VALUES = ".outlier_columns", ".outlier_values"
SUFFIXES = (COLUMNS, VALUES)


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when a weight `[O, I]` has not that many columns, or its codes cannot be stored."""
    if scheme.outliers is not None and scheme.outliers >= shape[1]:
        raise SchemeError(f"{scheme.outliers} outlier columns are all of {shape[1]} inputs", "Keep fewer in 16 bits")
    compressed_tensors.check(scheme.base, shape)


def encode(module: str, weight: OutlierWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of one linear layer, by full name."""
    check(weight.scheme, weight.shape)
    return compressed_tensors.encode(module, weight.base, dtype) | {
        f"{module}{COLUMNS}": weight.columns.to(torch.int32),
        f"{module}{VALUES}": weight.values.to(dtype).contiguous(),
    }


def decode(module: str, get: Get, scheme: Scheme) -> OutlierWeight:
    """The weight. Raises CheckpointError or SchemeError when tensors contradict each other or the scheme."""
    base = compressed_tensors.decode_integers(module, get, scheme.base)
    return OutlierWeight(base, get(f"{module}{COLUMNS}"), get(f"{module}{VALUES}"), scheme)
