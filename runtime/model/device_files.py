"""Packed weights that are unpacked on the device that serves them, and files that are read into its memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import LazyTensor
from compress.checkpoint.weights import Scheme, Weight
from compress.common.errors import CheckpointError

NUM_READERS = 4
PIECE_BYTES = 8 << 20
"""Bytes that a thread reads at a time; smaller tensors are copied from the memory map."""


class DeviceReader:
    """Reads parts of files into the memory of a device: several threads fill buffers, and copy each to the device while
    others are filled.

    Copying from a memory map waits for the system to map each page, in one thread. On NVIDIA GPUs the buffers are
    pinned, which lets the GPU fetch them by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights")
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()

    def tensor(self, stored: LazyTensor) -> Tensor:
        """Returns a stored tensor on the device. Raises CheckpointError if its file ends before it."""
        if stored.place is None or stored.nbytes < PIECE_BYTES:
            return stored.read().to(self.device)
        return self.read(*stored.place, stored.nbytes).view(stored.dtype).view(stored.shape)

    def read(self, path: Path, start: int, size: int) -> Tensor:
        """Returns bytes of a file as uint8 `[size]` on the device."""
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        # Memory that was free may still be read by what the device computes.
        before = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        firsts = range(0, size, PIECE_BYTES)
        with path.open("rb", buffering=0) as stream:
            copies = [
                self._threads.submit(self._copy, stream, start + first, piece, before)
                for first, piece in zip(firsts, target.split(PIECE_BYTES), strict=True)
            ]
            wait(copies)  # also after an error: they read the open file
        for copy in copies:
            copy.result()
        return target

    def _copy(self, file: FileIO, start: int, target: Tensor, before: torch.cuda.Event | None) -> None:
        buffer = _Buffer(self.device) if self._buffers.empty() else self._buffers.get()
        try:
            buffer.fill(file, start, len(target))
            buffer.copy_to(target, before)
        finally:
            self._buffers.put(buffer)


def reader_for(device: torch.device) -> DeviceReader | None:
    """Returns what reads into the memory of a device; None for the CPU, which maps files."""
    return None if device.type == "cpu" else DeviceReader(device)


class _Buffer:
    """Memory of the host for one piece, and on an NVIDIA GPU a stream for its copies."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def fill(self, file: FileIO, start: int, size: int) -> None:
        """Reads bytes of a file. Raises CheckpointError if there are fewer."""
        view, done = self._memory.numpy().data, 0
        while done < size:
            count = os.preadv(file.fileno(), [view[done:size]], start + done)
            if not count:
                problem = f"{file.name!s} ends at {start + done} bytes, within a tensor"
                raise CheckpointError(problem, "Copy or download this file again")
            done += count

    def copy_to(self, target: Tensor, before: torch.cuda.Event | None) -> None:
        """Copies the first bytes to a device after an event there, and waits for that."""
        if self._stream is None or before is None:
            target.copy_(self._memory[: len(target)])
            return
        self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            target.copy_(self._memory[: len(target)], non_blocking=True)
        self._stream.synchronize()


def unpacked_on(checkpoint: PackedCheckpoint, module: str, reader: DeviceReader) -> Weight | Tensor:
    """Reads a packed weight that `unpacks_anywhere`: matrices of integers (codes and zero points) are unpacked on the
    device of `reader`, and scales are in host memory."""
    stored = {name: checkpoint.files[name] for name in checkpoint.packed_names(module)}
    placed = {
        name: replace(tensor, read=partial(reader.tensor, tensor))
        for name, tensor in stored.items()
        if len(tensor.shape) == 2 and not tensor.dtype.is_floating_point
    }
    return replace(checkpoint, files=replace(checkpoint.files, tensors={**stored, **placed})).weight(module)


def unpacks_anywhere(scheme: Scheme | None) -> bool:
    """Whether a module is plain integers, unpacked by operations on one matrix at a time."""
    return scheme is not None and scheme.numbers == "int" and not scheme.structure
