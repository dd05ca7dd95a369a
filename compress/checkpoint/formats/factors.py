"""The two factors of a weight of low rank, stored under the names `<module>.left` and `<module>.right`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from compress.checkpoint.errors import SchemeError
from compress.checkpoint.formats import compressed_tensors
from compress.checkpoint.formats.tensors import Get, owners
from compress.checkpoint.low_rank import Factor, LowRankWeight
from compress.checkpoint.scheme import Scheme

SIDES = ("left", "right")
SUFFIXES: tuple[str, ...] = tuple(f".{side}{suffix}" for side in SIDES for suffix in compressed_tensors.SUFFIXES)


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when a weight `[O, I]` cannot have this rank, or its factors these groups."""
    if scheme.rank is not None and scheme.rank > min(shape):
        raise SchemeError(f"a weight {shape[0]} x {shape[1]} has no rank of {scheme.rank}", "Leave the layer out")
    for factor, _, columns in scheme.matrices(*shape):
        if factor is not None:
            factor.num_groups(columns)


def encode(module: str, weight: LowRankWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of both factors, by full name."""
    check(weight.scheme, weight.shape)
    tensors: dict[str, Tensor] = {}
    for side, factor in zip(SIDES, weight.factors, strict=True):
        if isinstance(factor, Tensor):
            tensors[f"{module}.{side}.weight"] = factor.to(dtype).contiguous()
        else:
            tensors |= compressed_tensors.encode(f"{module}.{side}", factor, dtype)
    return tensors


def decode(module: str, get: Get, scheme: Scheme) -> LowRankWeight:
    """The factors. Raises CheckpointError or SchemeError when tensors contradict each other or the scheme."""
    left, right = (_decode_factor(f"{module}.{side}", get, scheme.factor) for side in SIDES)
    return LowRankWeight(left, right, scheme)


def shape(module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
    """`(O, I)` of the product."""
    left, right = (_shape(f"{module}.{side}", get, scheme.factor) for side in SIDES)
    return left[0], right[1]


def modules(names: Iterable[str], packed: Iterable[str]) -> list[str]:
    """Modules that are packed, with factors named by the layer that they make up.

    Args:
        names: all stored tensors.
        packed: modules that have a packed tensor; factors are among them as modules of their own.
    """
    listed = set(packed)
    stored = {*listed, *owners(names, ".weight")}
    left, right = ({each.removesuffix(f".{side}") for each in stored if each.endswith(f".{side}")} for side in SIDES)
    paired = left & right
    factors = {f"{module}.{side}" for module in paired for side in SIDES}
    return sorted((listed - factors) | paired)


def _decode_factor(name: str, get: Get, scheme: Scheme | None) -> Factor:
    return get(f"{name}.weight") if scheme is None else compressed_tensors.decode_integers(name, get, scheme)


def _shape(name: str, get: Get, scheme: Scheme | None) -> tuple[int, int]:
    if scheme is not None:
        return compressed_tensors.shape(name, get, scheme)
    rows, columns = get(f"{name}.weight").shape
    return rows, columns
