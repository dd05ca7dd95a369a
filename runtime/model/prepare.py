"""Writes and checks the prepared weights of a checkpoint."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.cli import BUNDLED, bundled_path
from compress.common.device import resolve_device
from compress.common.errors import CheckpointError, ToolkitError
from compress.cpu.binding import absence
from runtime.backends.cpu.huge_pages import read_into_huge_pages
from runtime.core.progress import Report, ignore
from runtime.model.loader import load_model
from runtime.model.prepared import PreparedFile, writing
from runtime.model.prepared_key import CPU, CUDA, places


def prepare_model(path: Path, in_cache: bool = False, report: Report = ignore, device: str = CPU) -> tuple[Path, int]:
    """Writes the prepared weights of the checkpoint at `path` and returns their file and number.

    Args:
        in_cache: into the cache folder, as where the checkpoint is a bundled one or cannot be written to.
        device: `cpu`, `cuda` or `cuda:N`, whose kernels the weights are for.
        report: is told how many layers are done.

    Raises:
        CheckpointError: the checkpoint cannot be loaded, or the disk is full.
        ToolkitError: there are no CPU kernels, no weight that they pack, or no folder that can be written.
    """
    kind = resolve_device(device).type
    if kind == CPU and (reason := absence()):
        raise ToolkitError("there are no CPU kernels that weights could be prepared for", reason)
    checkpoint = PackedCheckpoint.open(path)
    beside, cached = places(checkpoint.path, kind)
    in_cache = in_cache or any(checkpoint.path == bundled_path(name) for name in BUNDLED)
    target = next((place for place in ([] if in_cache else [beside]) + [cached] if _makes_folder(place.parent)), None)
    if target is None:
        raise ToolkitError(f"neither {beside.parent} nor {cached.parent} can be written", "Free one of them")
    try:
        with writing(target, checkpoint, kind) as writer:
            load_model(path, device=device, prepared=writer, report=report)
            if not writer.linears:
                raise ToolkitError(f"{path} has no weight that kernels of {kind} pack", "Serve it as it is")
    finally:
        with suppress(OSError):
            target.parent.rmdir()  # fails unless nothing was written
    if kind == CPU:
        read_into_huge_pages(target)
    return target, len(writer.linears)


def check_prepared_files(path: Path) -> list[tuple[Path, int]]:
    """Compares all bytes of the prepared weights of the checkpoint at `path`, and of itself, with their digests.

    Returns:
        The files that a start on this machine would map, with the number of their weights.

    Raises:
        CheckpointError: the checkpoint cannot be read, or a prepared file is damaged or belongs to something else.
        ToolkitError: there is no such file.
    """
    checkpoint = PackedCheckpoint.open(path).path
    files = [(place, kind) for kind in (CPU, CUDA) for place in places(checkpoint, kind) if place.is_file()]
    if not files:
        raise ToolkitError(f"{path} has no prepared weights for this machine", f"Run runtime prepare {path}")
    return [(file, _check(file, checkpoint, kind)) for file, kind in files]


def _check(file: Path, checkpoint: Path, kind: str) -> int:
    try:
        prepared = PreparedFile.open(file, checkpoint, kind)
        prepared.check(checkpoint)
    except CheckpointError as error:
        remedy = f"Run runtime prepare {checkpoint}"
        raise CheckpointError(f"{file} must not be used: {error.problem}", remedy) from error
    return len(prepared.linears)


def _makes_folder(folder: Path) -> bool:
    """Makes a folder and returns whether files can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
