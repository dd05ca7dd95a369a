"""Re-reads a checkpoint from disk and looks for anything that is not as it should be. Shares no code with encoding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from pathlib import Path

import torch

from compress.checkpoint.config import compression_block, quantization_block
from compress.checkpoint.errors import CheckpointError, SchemeError
from compress.checkpoint.expected import expected_shape, is_tabled, missing_parameters
from compress.checkpoint.formats import compressed_tensors
from compress.checkpoint.kv_cache import stored_kv_cache
from compress.checkpoint.kv_measured import measured_kv_caches
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.source import TensorFiles
from compress.checkpoint.structure import DenseTensor, StructureReport
from compress.checkpoint.weight_problems import weight_problems


def verify_structure(path: str | Path, source: TensorFiles | None = None) -> StructureReport:
    """Checks config, names, shapes, dtypes, code ranges and finiteness of a whole checkpoint, module by module.

    Args:
        path: the packed (or dense) checkpoint.
        source: the dense model it was made from, when at hand: then every tensor of it must be found again.

    Raises:
        CheckpointError: the folder cannot be opened at all (missing, truncated, unknown format).
    """
    packed = PackedCheckpoint.open(path)
    problems = [*_config_problems(packed), *_name_problems(packed, source)]
    shapes = _read_weights(packed, problems)
    for name in packed.dense_names():
        problems += _dense_problems(packed, name)
        packed.files.release()
    linears = set(packed.dense_linears())
    dense = tuple(_describe_dense(packed, name, linears) for name in packed.dense_names())
    num_quantized = sum(rows * columns for rows, columns in shapes.values())
    return StructureReport(
        path=str(packed.path),
        format=packed.format,
        problems=tuple(problems),
        quantized={module: str(scheme) for module, scheme in packed.schemes.items()},
        dense=dense,
        num_parameters=num_quantized + sum(math.prod(tensor.shape) for tensor in dense),
        num_quantized=num_quantized,
        quantized_bytes=sum(packed.weight_bytes(module) for module in shapes),
        total_bytes=packed.files.file_bytes,
        notes=() if is_tabled(packed.config) else ("shapes were not compared with the config: unknown model type",),
    )


def _read_weights(packed: PackedCheckpoint, problems: list[str]) -> dict[str, tuple[int, int]]:
    """Shapes of the packed modules that can be read; what is wrong with any is added to `problems`."""
    shapes: dict[str, tuple[int, int]] = {}
    for module in packed.modules:
        try:
            weight = packed.packed_weight(module)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        shapes[module] = weight.shape
        problems += weight_problems(packed, module, weight)
        packed.files.release()
    return shapes


def _config_problems(packed: PackedCheckpoint) -> Iterator[str]:
    if not packed.config.get("model_type"):
        yield "config.json has no model_type"
    block = quantization_block(packed.config)
    if block and not packed.modules:
        yield "config.json announces quantized weights, but none are stored"
    yield from _kv_cache_problems(packed)
    if packed.format != compressed_tensors.NAME:
        return
    if block.get("quantization_status") not in (None, "compressed", "frozen"):
        yield f"quantization_status is {block['quantization_status']!r}, not 'compressed'"
    patterns = any(str(entry).startswith("re:") for entry in block.get("ignore") or ())
    unlisted = set(packed.dense_linears()) - set(block.get("ignore") or ())
    if unlisted and not patterns:
        yield f"dense linear layers missing from `ignore`: {', '.join(sorted(unlisted))}"


def _kv_cache_problems(packed: PackedCheckpoint) -> Iterator[str]:
    """The default form of keys and values, and what was measured of it."""
    try:
        scheme, record = stored_kv_cache(packed.config), measured_kv_caches(packed.config)
    except (CheckpointError, SchemeError) as error:
        yield error.problem
        return
    measured = record.find(scheme) if scheme and record else None
    if scheme and record and not scheme.is_exact and not (measured and record.passes(measured)):
        yield f"keys and values default to {scheme}, which was not measured within a mean KL of {record.max_kl:g}"


def _name_problems(packed: PackedCheckpoint, source: TensorFiles | None) -> Iterator[str]:
    """Every stored tensor must have a role, and every parameter of the model must be stored in one way."""
    for name in packed.dense_names():
        suffix = next((suffix for suffix in packed.codec.SUFFIXES if name.endswith(suffix)), None)
        if suffix not in (None, ".weight") or name.endswith(
            (".weight_scale", ".qweight", ".weight_packed", ".weight_indices")
        ):
            yield f"{name} belongs to no quantized module"
    for module in packed.modules:
        names = packed.packed_names(module)
        if f"{module}.weight" in names and f"{module}.weight_packed" in names:
            yield f"{module} is stored both dense and packed"
        if packed.schemes[module].symmetric and f"{module}.weight_zero_point" in names:
            yield f"{module} is symmetric, but stores zero points"
    stored = {*packed.dense_names(), *(f"{module}.weight" for module in packed.modules)}
    if packed.tied:
        stored.add("lm_head.weight")
    for name in missing_parameters(packed.config, stored):
        yield f"{name} is missing"
    if source is not None:
        yield from (f"{name} of the source is missing" for name in source.names() if name not in stored)
        extra = stored - set(source.names()) - {"lm_head.weight"}
        yield from (f"{name} is not in the source" for name in sorted(extra))


def _dense_problems(packed: PackedCheckpoint, name: str) -> Iterator[str]:
    tensor = packed.tensor(name)
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor.to(torch.float32)).all()):
        yield f"{name} holds NaN or infinity"
    expected = expected_shape(name.removesuffix(".weight"), packed.config) if name.endswith(".weight") else None
    if expected and expected != tuple(tensor.shape):
        yield f"{name} is {tuple(tensor.shape)}, but config.json says {expected}"


def _describe_dense(packed: PackedCheckpoint, name: str, linears: Set[str]) -> DenseTensor:
    shape = packed.files.shape(name)
    return DenseTensor(name, shape, packed.files.tensor_nbytes(name), _reason(packed, name, shape, linears))


def _reason(packed: PackedCheckpoint, name: str, shape: tuple[int, ...], linears: Set[str]) -> str:
    """Why a tensor stayed dense: as recorded when it was planned, else what it evidently is."""
    module = name.rpartition(".")[0]
    recorded = compression_block(packed.config).get("dense") or {}
    if module in recorded:
        return str(recorded[module])
    if len(shape) < 2:
        return "norm or bias"
    if module not in linears:
        return "embedding, also the output head (tied)" if packed.tied else "embedding"
    return "dense checkpoint" if not packed.modules else "left out (ignore)"
