"""Reads the headers of a checkpoint and works out what it needs."""

from __future__ import annotations

from pathlib import Path

from compress.checkpoint.device import resolve_device
from compress.checkpoint.errors import ToolkitError
from compress.checkpoint.reader import PackedCheckpoint
from runtime.capacity.capacity import ITEM_SIZES, estimate
from runtime.capacity.remedies import find_remedies
from runtime.capacity.report import Report
from runtime.capacity.weights import Weights
from runtime.config import RuntimeConfig
from runtime.free_memory import available_bytes
from runtime.kernels.base import Target
from runtime.memory import MemoryPlan, plan_memory
from runtime.model.config import DecoderConfig, parse_config, read_generation_config
from runtime.model.target import resolve_dtype
from runtime.model.tensors import check_tensors


def inspect(path: Path, scheme: str, config: RuntimeConfig, memory_bytes: int | None = None) -> Report:
    """What a checkpoint needs, and what fits in the given memory or in what is free here. Reads no weights.

    Args:
        scheme: how the weights are stored, in words.

    Raises:
        CheckpointError: the folder cannot be read or served, and why.
        ToolkitError: a device, dtype or kernel that is not there.
    """
    checkpoint = PackedCheckpoint.open(path)
    model = parse_config(checkpoint.config, read_generation_config(checkpoint.path))
    device = resolve_device(config.device)
    target = Target(device, resolve_dtype(config.dtype, model.dtype, device))
    check_tensors(checkpoint, model)
    memory = available_bytes(device) if memory_bytes is None else memory_bytes
    weights = Weights(checkpoint, model, target, config.kernels, memory)
    dtype, weight_bytes = str(target.dtype).removeprefix("torch."), weights.prepared()
    capacity = estimate(model, config, dtype, weight_bytes, memory)
    return Report(
        path.resolve().name,
        "as asked for" if memory_bytes is not None else f"free on this {device.type.upper()} now",
        scheme,
        model,
        weights.stored_bytes,
        capacity,
        _plan(model, weight_bytes, dtype, config, memory - weight_bytes if device.type == "cuda" else None),
        find_remedies(path, weights, config, capacity),
    )


def _plan(
    model: DecoderConfig, weight_bytes: int, dtype: str, config: RuntimeConfig, free_gpu_bytes: int | None
) -> MemoryPlan | str:
    """What serving with this configuration allocates, or the refusal."""
    try:
        return plan_memory(model, weight_bytes, ITEM_SIZES[dtype], config, free_gpu_bytes)
    except ToolkitError as error:
        return str(error)
