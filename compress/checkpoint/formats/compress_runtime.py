"""What compressed-tensors cannot say: N:M sparse weights, whose zeros are not stored, weights of low rank, stored as
two factors, outlier columns in 16 bits beside the codes, and packed embeddings. Defined in
`docs/checkpoint-format.md`; other engines refuse it by its name, and read `compress export --format dense`.

Other modules are stored exactly as `compressed_tensors` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats import compressed_tensors
from compress.checkpoint.formats.tensors import Get, cast_exactly, owners
from compress.checkpoint.packing import num_words, pack_bits, unpack_bits
from compress.checkpoint.scheme import Scheme, Sparsity
from compress.checkpoint.weights import PackedWeight
from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight
from compress.checkpoint.weights.low_rank import Factor, LowRankWeight
from compress.checkpoint.weights.outlier_columns import OutlierWeight
from compress.checkpoint.weights.sparse_nm import PrunedWeight
from compress.common.errors import CheckpointError, SchemeError

SIDES = ("left", "right")
FACTOR_SUFFIXES: tuple[str, ...] = tuple(f".{side}{suffix}" for side in SIDES for suffix in compressed_tensors.SUFFIXES)


def check_factors(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when a weight `[O, I]` cannot have this rank, or its factors these groups."""
    if scheme.rank is not None and scheme.rank > min(shape):
        raise SchemeError(f"a weight {shape[0]} x {shape[1]} has no rank of {scheme.rank}", "Leave the layer out")
    for factor, _, columns in scheme.matrices(*shape):
        if factor is not None:
            factor.num_groups(columns)


def encode_factors(module: str, weight: LowRankWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of both factors, by full name."""
    check_factors(weight.scheme, weight.shape)
    tensors: dict[str, Tensor] = {}
    for side, factor in zip(SIDES, weight.factors, strict=True):
        if isinstance(factor, Tensor):
            tensors[f"{module}.{side}.weight"] = factor.to(dtype).contiguous()
        else:
            tensors |= compressed_tensors.encode(f"{module}.{side}", factor, dtype)
    return tensors


def decode_factors(module: str, get: Get, scheme: Scheme) -> LowRankWeight:
    """The factors. Raises CheckpointError or SchemeError when tensors contradict each other or the scheme."""
    left, right = (_decode_factor(f"{module}.{side}", get, scheme.factor) for side in SIDES)
    return LowRankWeight(left, right, scheme)


def shape_factors(module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
    """`(O, I)` of the product."""
    left, right = (_shape(f"{module}.{side}", get, scheme.factor) for side in SIDES)
    return left[0], right[1]


def modules_factors(names: Iterable[str], packed: Iterable[str]) -> list[str]:
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


COLUMNS, VALUES = ".outlier_columns", ".outlier_values"
OUTLIER_SUFFIXES = (COLUMNS, VALUES)


def check_outliers(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when a weight `[O, I]` has not that many columns, or its codes cannot be stored."""
    if scheme.outliers is not None and scheme.outliers >= shape[1]:
        raise SchemeError(f"{scheme.outliers} outlier columns are all of {shape[1]} inputs", "Keep fewer in 16 bits")
    compressed_tensors.check(scheme.base, shape)


def encode_outliers(module: str, weight: OutlierWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of one linear layer, by full name."""
    check_outliers(weight.scheme, weight.shape)
    return compressed_tensors.encode(module, weight.base, dtype) | {
        f"{module}{COLUMNS}": weight.columns.to(torch.int32),
        f"{module}{VALUES}": weight.values.to(dtype).contiguous(),
    }


def decode_outliers(module: str, get: Get, scheme: Scheme) -> OutlierWeight:
    """The weight. Raises CheckpointError or SchemeError when tensors contradict each other or the scheme."""
    base = compressed_tensors.decode_integers(module, get, scheme.base)
    return OutlierWeight(base, get(f"{module}{COLUMNS}"), get(f"{module}{VALUES}"), scheme)


NAME = "compress-runtime"
SUFFIXES: tuple[str, ...] = (
    *compressed_tensors.SUFFIXES,
    ".weight_values",
    ".weight_indices",
    *OUTLIER_SUFFIXES,
    *FACTOR_SUFFIXES,
)


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when this format cannot hold a weight `[O, I]` of this scheme."""
    if scheme.outliers is not None:
        return check_outliers(scheme, shape)
    if scheme.rank is not None:
        return check_factors(scheme, shape)
    if scheme.sparsity is None:
        return compressed_tensors.check(scheme, shape)
    if shape[1] % scheme.sparsity.of:
        raise SchemeError(
            f"the {scheme.sparsity} pattern does not divide {shape[1]} input features", "Leave the layer out (--ignore)"
        )
    if not scheme.is_float:
        scheme.num_groups(shape[1])
    return None


def encode(module: str, weight: PackedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of one linear layer, by full name.

    Raises:
        SchemeError: more values differ from zero than the pattern keeps, or the scheme cannot be stored.
    """
    if isinstance(weight, OutlierWeight):
        return encode_outliers(module, weight, dtype)
    if isinstance(weight, LowRankWeight):
        return encode_factors(module, weight, dtype)
    scheme, sparsity = weight.scheme, weight.scheme.sparsity
    check(scheme, weight.shape)
    if isinstance(weight, PrunedWeight):
        places = kept_places(module, weight.values != 0, weight.sparsity)
        values = weight.values.to(dtype).gather(1, places).contiguous()
        return {f"{module}.weight_values": values, f"{module}.weight_indices": _pack_places(places, weight.sparsity)}
    if sparsity is None or isinstance(weight, Fp8Weight):
        return compressed_tensors.encode(module, weight, dtype)
    zero = weight.zero.repeat_interleave(weight.shape[1] // weight.zero.shape[1], 1)
    places = kept_places(module, weight.codes != zero, sparsity)
    tensors = {
        f"{module}.weight_packed": pack_bits(weight.codes.gather(1, places), scheme.bits, 1),
        f"{module}.weight_indices": _pack_places(places, sparsity),
        f"{module}.weight_scale": cast_exactly(module, weight.scale, dtype),
        f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not scheme.symmetric:
        tensors[f"{module}.weight_zero_point"] = pack_bits(weight.zero, scheme.bits, 0)
    return tensors


def decode(module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> PackedWeight:
    """The weight `[O, I]` with its zeros in place.

    Raises:
        CheckpointError: tensors contradict each other.
    """
    if scheme.outliers is not None:
        return decode_outliers(module, get, scheme)
    if scheme.rank is not None:
        return decode_factors(module, get, scheme)
    if scheme.sparsity is None:
        return compressed_tensors.decode(module, get, scheme, config)
    rows, columns = shape(module, get, scheme)
    places = _read_places(module, get, scheme.sparsity, rows, columns)
    if scheme.is_float:
        values = get(f"{module}.weight_values")
        return PrunedWeight(torch.zeros(rows, columns, dtype=values.dtype).scatter_(1, places, values), scheme)
    groups = scheme.num_groups(columns)
    zero = compressed_tensors.read_zero(module, get, scheme, rows, groups)
    kept = unpack_bits(get(f"{module}.weight_packed"), scheme.bits, places.shape[1], 1)
    codes = zero.repeat_interleave(columns // groups, 1).scatter_(1, places, kept)
    scale = get(f"{module}.weight_scale").reshape(rows, groups).contiguous()
    return IntegerWeight(codes, scale, zero, scheme)


def shape(module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
    """`(O, I)` of a stored layer, without decoding it."""
    if scheme.rank is not None:
        return shape_factors(module, get, scheme)
    if scheme.sparsity is None or not scheme.is_float:
        return compressed_tensors.shape(module, get, scheme)
    rows, kept = get(f"{module}.weight_values").shape
    return rows, kept // scheme.sparsity.kept * scheme.sparsity.of


def modules(names: Iterable[str]) -> list[str]:
    """Quantized, sparse or factorized modules among tensor names."""
    listed = list(names)
    return modules_factors(listed, {*owners(listed, ".weight_scale"), *owners(listed, ".weight_indices")})


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json: one group of modules for each scheme.

    It has no `quant_method` on purpose: transformers only warns of a method that it does not know, and goes on with
    random weights, but refuses a config that names none.
    """
    grouped: dict[Scheme, list[str]] = {}
    for module in sorted(schemes):
        grouped.setdefault(schemes[module], []).append(module)
    groups = [{"scheme": scheme.to_dict(), "modules": members} for scheme, members in grouped.items()]
    return {"format": NAME, "groups": groups, "ignore": sorted(ignored)}


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of every module. Raises CheckpointError for a stored module that no group lists."""
    listed = {
        module: Scheme.from_dict(group["scheme"]) for group in config.get("groups", ()) for module in group["modules"]
    }
    found = list(modules)
    if missing := [module for module in found if module not in listed]:
        raise CheckpointError(f"no group of quantization_config lists {missing[0]}, which is stored packed")
    return {module: listed[module] for module in found}


def kept_places(module: str, nonzero: Tensor, sparsity: Sparsity) -> Tensor:
    """Columns `[O, I / of * kept]`, rising within each row, of the values that are stored: all that are not zero, and
    where a group has fewer, the first of its zeros.

    Args:
        nonzero: bool `[O, I]`.

    Raises:
        SchemeError: a group has more values than the pattern keeps.
    """
    rows, columns = nonzero.shape
    grouped = nonzero.view(rows, columns // sparsity.of, sparsity.of)
    crowded = int((grouped.sum(-1) > sparsity.kept).sum())
    if crowded:
        raise SchemeError(f"{crowded} groups of {module} hold more values than {sparsity} keeps", "Prune the layer")
    places = (~grouped).to(torch.uint8).argsort(dim=-1, stable=True)[..., : sparsity.kept].sort(-1).values
    starts = torch.arange(0, columns, sparsity.of).view(1, -1, 1)
    return (places + starts).view(rows, -1)


def _pack_places(places: Tensor, sparsity: Sparsity) -> Tensor:
    return pack_bits((places % sparsity.of).to(torch.uint8), sparsity.index_bits, 1)


def _read_places(module: str, get: Get, sparsity: Sparsity, rows: int, columns: int) -> Tensor:
    words = get(f"{module}.weight_indices")
    count = columns // sparsity.of * sparsity.kept
    if tuple(words.shape) != (rows, num_words(count, sparsity.index_bits)):
        raise CheckpointError(
            f"{module}.weight_indices is {list(words.shape)}, but {rows} x {count} places of {sparsity} pack to "
            f"{[rows, num_words(count, sparsity.index_bits)]}"
        )
    inside = unpack_bits(words, sparsity.index_bits, count, 1).view(rows, -1, sparsity.kept).long()
    if bool((inside.diff(dim=-1) <= 0).any()):
        raise CheckpointError(f"{module}.weight_indices has places that do not rise within their group")
    starts = torch.arange(0, columns, sparsity.of).view(1, -1, 1)
    return (inside + starts).view(rows, count)
